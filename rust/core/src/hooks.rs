//! The questions that the scheduler can't answer by itself.

use std::convert::Infallible;

use crate::ids::RequestIndex;

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

/// Asked only for requests that use structured output.
pub trait Hooks {
    /// What a hook fails with: the step ends with it, and the scheduler is not to be used further.
    type Error;

    /// Whether the grammar of this waiting request is there.
    ///
    /// # Errors
    /// Whatever the owner of the grammar fails with.
    fn grammar_state(&mut self, request: RequestIndex) -> Result<GrammarState, Self::Error>;

    /// Advances the request's grammar by the last `num_new_tokens` of its `sequence`, prompt
    /// included. `false` means that the grammar rejects them.
    ///
    /// # Errors
    /// Whatever the owner of the grammar fails with.
    fn accept_tokens(
        &mut self,
        request: RequestIndex,
        sequence: &[i32],
        num_new_tokens: usize,
    ) -> Result<bool, Self::Error>;
}

/// For schedulers whose requests use none of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHooks;

impl Hooks for NoHooks {
    type Error = Infallible;

    fn grammar_state(&mut self, _: RequestIndex) -> Result<GrammarState, Infallible> {
        Ok(GrammarState::Ready)
    }

    fn accept_tokens(&mut self, _: RequestIndex, _: &[i32], _: usize) -> Result<bool, Infallible> {
        Ok(true)
    }
}
