//! vLLM V1's scheduling as plain Rust: requests, KV blocks, the prefix cache, `schedule()` and
//! `update_from_output()`.
//!
//! The crate knows neither Python nor the clock nor any I/O: time arrives as an argument, and the
//! few questions that only Python can answer (is a grammar compiled, does it accept a token, what
//! does a session go on with) go through [`Callbacks`]. Decisions equal those of the `Scheduler` and
//! `AsyncScheduler` of a release of vLLM for the configurations that [`SchedulerConfig`] can
//! express; everything else is refused before this crate is reached. What the releases decide
//! differently is in [`config::Behaviors`].
//!
//! Where to read first: `scheduler/policy.rs`, in the order of vLLM's own `schedule()`. No modules
//! know each other in a circle; only [`pacing`] and [`queue_watch`] know [`scheduler`].
#![forbid(unsafe_code)]

pub mod block_hash;
pub mod block_pool;
pub mod callbacks;
pub mod config;
pub mod ids;
pub mod journal;
pub mod kv_cache_group;
pub mod kv_cache_manager;
pub mod order;
pub mod pacing;
pub mod promise;
pub mod queue_watch;
pub mod request;
pub mod request_queue;
pub mod scheduler;
pub mod slots;
mod state_group;
pub mod stats;
pub mod step;
pub mod stop;
pub mod wait_reason;

pub use block_hash::{BlockHash, BlockHasher, ExtraKeys, HashAlgorithm};
pub use block_pool::BlockPool;
pub use callbacks::{
    AuxOutputs, Callbacks, EcConnector, EncoderInputs, ExternalAllocation, ExternalHit, Fallible,
    GrammarState, Grammars, KvConnector, NextTurn, Sessions,
};
pub use config::{
    Behaviors, KvCacheGroupConfig, KvTransferConfig, Policy, RequestSpecMetrics, SchedulerConfig,
    Speculation, StateConfig, StateMode, StepKnobs,
};
pub use ids::{BlockId, GroupId, RequestIndex};
pub use journal::{Journal, JournalConfig, StoredBlocks};
pub use kv_cache_manager::{BlockShortfall, KvCacheManager};
pub use order::OrderSettings;
pub use pacing::{
    Chosen, LatePrompt, Mode, OverStall, PacedStep, Pacing, PacingReport, PacingSettings,
};
pub use promise::{LateBy, Promise};
pub use queue_watch::{Finding, QueueWatch};
pub use request::{
    Event, EventKind, FetchStage, NewRequest, PrefillStats, Request, RequestStatus, SessionInput,
};
pub use scheduler::{
    BlockHolders, Demand, EndedRequest, FailedLoads, HeadOfQueue, PauseState, Prompt, RequestNews,
    RequestOutput, ScheduledOutput, Scheduler, StepLoad,
};
pub use stats::{PrefixCacheStats, RequestSpecStats, SchedulerStats, SpecDecodingStats};
pub use step::{Admission, ScheduledRequest, Step};
pub use stop::{RepetitionDetection, StopConditions, StopReason};
pub use wait_reason::{WaitCounts, WaitReason};
