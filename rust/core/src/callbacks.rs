//! The questions that the scheduler can't answer by itself: a trait for each owner of answers.

use crate::block_pool::BlockPool;
use crate::ids::{BlockId, RequestIndex};
use crate::request::{Request, SessionInput};

/// How far the grammar of a waiting request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarState {
    /// Still being compiled: the request stays where it is.
    Pending,
    /// Compiled: the request may run.
    Ready,
    /// It can't be compiled: the caller will finish the request with an error.
    Failed,
}

/// What comes after a session's turn.
#[derive(Clone, Debug)]
pub enum NextTurn {
    /// Nothing yet: the session waits.
    Pending,
    Input(SessionInput),
    Closed,
}

/// What a connector has of a request behind its local prefix hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExternalHit {
    /// Tokens whose KV it can bring. Below zero, vLLM takes a connector at its word, too, that has
    /// less than the prefix cache: so many tokens of the local hit are computed again.
    pub num_tokens: i32,
    /// It brings them between steps.
    pub is_async: bool,
}

/// What was allocated for a waiting request, as far as its connector has a part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExternalAllocation {
    /// Tokens that the connector is to bring.
    pub num_tokens: i32,
    /// Tokens that it was asked for.
    pub num_queried_tokens: u32,
}

/// What a callback fails with: the step ends with it, and the scheduler is not to be used further.
pub trait Fallible {
    /// What its owner fails with.
    type Error;
}

/// The grammars of requests with structured output.
#[expect(clippy::missing_errors_doc, reason = "see `Fallible`")]
pub trait Grammars: Fallible {
    fn grammar_state(&mut self, request: RequestIndex) -> Result<GrammarState, Self::Error>;

    /// Advances the request's grammar by the last `num_new_tokens` of its `sequence`, prompt
    /// included. `false` means that the grammar rejects them.
    fn accept_tokens(
        &mut self,
        request: RequestIndex,
        sequence: &[i32],
        num_new_tokens: usize,
    ) -> Result<bool, Self::Error>;
}

/// What streaming-input sessions go on with.
#[expect(clippy::missing_errors_doc, reason = "see `Fallible`")]
pub trait Sessions: Fallible {
    /// What a session goes on with whose turn has ended. Its `sequence` will be cut to
    /// `num_kept_tokens` then.
    fn next_turn(
        &mut self,
        request: RequestIndex,
        sequence: &[i32],
        num_kept_tokens: usize,
    ) -> Result<NextTurn, Self::Error>;
}

/// The encoder's budget and cache. Asked for requests that have encoder inputs.
#[expect(clippy::missing_errors_doc, reason = "see `Fallible`")]
pub trait EncoderInputs: Fallible {
    /// Looks which encoder inputs a request needs for `num_new_tokens` tokens behind its first
    /// `num_computed_tokens`. Returns how many tokens it can have with those that the encoder's
    /// budget and cache allow.
    fn plan_encoder_inputs(
        &mut self,
        request: RequestIndex,
        num_computed_tokens: u32,
        num_new_tokens: u32,
    ) -> Result<u32, Self::Error>;

    /// The request that was looked at last is part of the step: its encoder inputs are, too.
    fn schedule_encoder_inputs(&mut self, request: &Request) -> Result<(), Self::Error>;

    /// The first `num_processed_tokens` tokens of a request have been computed: it doesn't need the
    /// encoder inputs in them any more.
    fn free_processed_encoder_inputs(
        &mut self,
        request: &Request,
        num_processed_tokens: u32,
    ) -> Result<(), Self::Error>;

    /// A request leaves the step and the batch, for good or not: none of its encoder inputs is
    /// needed.
    fn free_encoder_inputs(&mut self, request: RequestIndex) -> Result<(), Self::Error>;
}

/// A KV connector. Asked if the configuration has [`kv_transfer`](crate::SchedulerConfig::kv_transfer).
#[expect(clippy::missing_errors_doc, reason = "see `Fallible`")]
pub trait KvConnector: Fallible {
    /// What the KV connector has of a waiting request behind its first `num_local_tokens` tokens,
    /// no more than the request has; `None` if it is not known yet.
    fn find_external_hit(
        &mut self,
        request: &Request,
        num_local_tokens: u32,
    ) -> Result<Option<ExternalHit>, Self::Error>;

    /// A waiting request has got its blocks, those that the KV connector is to fill included: their
    /// owners and hashes are in the `pool`.
    fn note_allocation(
        &mut self,
        request: &Request,
        pool: &BlockPool,
        allocation: ExternalAllocation,
    ) -> Result<(), Self::Error>;

    /// Whether blocks that the KV connector still sends will be free without a preemption.
    fn has_pending_block_frees(&mut self) -> Result<bool, Self::Error>;

    /// A request has ended whose computed tokens are in these blocks, by group. Returns whether the
    /// KV connector keeps them, until it says that they are sent.
    fn finish_request(
        &mut self,
        request: &Request,
        tables: &[&[BlockId]],
    ) -> Result<bool, Self::Error>;
}

/// An EC connector. Asked if the configuration
/// [`transfers_encoder_outputs`](crate::SchedulerConfig::transfers_encoder_outputs).
#[expect(clippy::missing_errors_doc, reason = "see `Fallible`")]
pub trait EcConnector: Fallible {
    /// Whether the EC connector has brought the encoder outputs that a request needs behind its
    /// first `num_computed_tokens` tokens, as far as it is to bring any.
    fn has_encoder_outputs(
        &mut self,
        request: &Request,
        num_computed_tokens: i64,
    ) -> Result<bool, Self::Error>;

    /// A request has ended, and what it had of encoder outputs is still there. Returns whether the
    /// EC connector keeps the request.
    fn end_encoder_transfer(&mut self, request: &Request) -> Result<bool, Self::Error>;
}

/// The collector of auxiliary output, such as routed experts. Asked if the configuration
/// [`collects_aux_output`](crate::SchedulerConfig::collects_aux_output). A `pool` that is lent comes back as it was.
#[expect(clippy::missing_errors_doc, reason = "see `Fallible`")]
pub trait AuxOutputs: Fallible {
    /// Where the prefix of a waiting request ends that there is auxiliary output of, in tokens.
    fn max_prefix_hit(
        &mut self,
        request: &Request,
        pool: &mut BlockPool,
    ) -> Result<u32, Self::Error>;

    /// How many of the tokens that the KV connector has behind a local hit can be taken: all or
    /// none, as there is auxiliary output of them or not.
    fn cap_external_hit(
        &mut self,
        request: &Request,
        pool: &mut BlockPool,
        num_local_tokens: u32,
        num_external_tokens: i32,
    ) -> Result<i32, Self::Error>;

    /// The KV connector begins to load a waiting request's blocks, between steps; its computed
    /// tokens are those that it will have then.
    fn note_load(&mut self, request: &Request) -> Result<(), Self::Error>;

    /// A request is about to lose its blocks, for good or not: no auxiliary output of it is
    /// collected until it is scheduled again.
    fn end_aux_output(
        &mut self,
        request: &Request,
        pool: &mut BlockPool,
    ) -> Result<(), Self::Error>;

    /// A client is told of a request, which has its new tokens: auxiliary output goes with them.
    fn take_aux_output(&mut self, request: &Request) -> Result<(), Self::Error>;
}

pub trait Callbacks:
    Grammars + Sessions + EncoderInputs + KvConnector + EcConnector + AuxOutputs
{
}

impl<T: Grammars + Sessions + EncoderInputs + KvConnector + EcConnector + AuxOutputs> Callbacks
    for T
{
}
