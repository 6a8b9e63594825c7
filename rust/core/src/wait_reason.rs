//! What requests wait for, for those who watch a server, and for pacing. No decision of the policy
//! rests on it.

macro_rules! reasons {
    ($($(#[$doc:meta])* $reason:ident = $name:literal,)*) => {
        /// What a waiting request waits for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum WaitReason {
            $($(#[$doc])* $reason,)*
        }

        impl WaitReason {
            /// All of them, in the order of [`WaitCounts`].
            pub const ALL: [Self; Self::COUNT] = [$(Self::$reason),*];
            pub const COUNT: usize = [$($name),*].len();

            /// Its name in metrics and logs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name,)*
                }
            }
        }
    };
}

reasons! {
    /// Nothing but the next step.
    Turn = "turn",
    /// Tokens of a step: others use them up.
    TokenBudget = "token_budget",
    /// A place among those that run.
    MaxNumSeqs = "max_num_seqs",
    /// KV cache blocks.
    Blocks = "blocks",
    /// That prompts are allowed again: the engine, or pacing, holds them back.
    HeldBack = "held_back",
    /// That scheduling is resumed.
    Pause = "pause",
    /// Its grammar, which is being compiled.
    Grammar = "grammar",
    /// A place among the adapters of a step.
    Adapter = "adapter",
    /// The encoder: its budget, or room for its outputs.
    Encoder = "encoder",
    /// Encoder outputs, which an EC connector is to bring.
    EncoderLoad = "encoder_load",
    /// A KV connector that doesn't know yet what it has.
    KvLookup = "kv_lookup",
    /// KV that a connector is to bring.
    KvLoad = "kv_load",
    /// Steps in flight, whose tokens are from before it was preempted.
    StaleOutput = "stale_output",
    /// Its client: a session between two turns.
    SessionInput = "session_input",
}

/// How many requests wait, by what they wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitCounts([usize; WaitReason::COUNT]);

impl WaitCounts {
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }

    /// By reason, in the order of [`WaitReason::ALL`].
    pub fn by_reason(&self) -> &[usize; WaitReason::COUNT] {
        &self.0
    }

    pub(crate) fn add(&mut self, reason: WaitReason) {
        self.add_many(reason, 1);
    }

    pub(crate) fn add_many(&mut self, reason: WaitReason, count: usize) {
        self.0[reason as usize] += count;
    }

    pub(crate) fn remove(&mut self, reason: WaitReason) {
        self.0[reason as usize] -= 1;
    }
}
