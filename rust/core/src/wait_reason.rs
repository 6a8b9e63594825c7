//! What requests wait for, for those who watch a server. No decision rests on it.

/// What a waiting request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// Nothing but the next step.
    Turn,
    /// Tokens of a step: others use them up.
    TokenBudget,
    /// A place among those that run.
    MaxNumSeqs,
    /// KV cache blocks.
    Blocks,
    /// That prompts are allowed again: the engine, or pacing, holds them back.
    HeldBack,
    /// That scheduling is resumed.
    Pause,
    /// Its grammar, which is being compiled.
    Grammar,
    /// A place among the adapters of a step.
    Adapter,
    /// The encoder: its budget, or room for its outputs.
    Encoder,
    /// Encoder outputs, which an EC connector is to bring.
    EncoderLoad,
    /// A KV connector that doesn't know yet what it has.
    KvLookup,
    /// KV that a connector is to bring.
    KvLoad,
    /// Steps in flight, whose tokens are from before it was preempted.
    StaleOutput,
    /// Its client: a session between two turns.
    SessionInput,
}

impl WaitReason {
    pub const COUNT: usize = 14;
    /// All of them, in the order of [`WaitCounts`].
    pub const ALL: [Self; Self::COUNT] = [
        Self::Turn,
        Self::TokenBudget,
        Self::MaxNumSeqs,
        Self::Blocks,
        Self::HeldBack,
        Self::Pause,
        Self::Grammar,
        Self::Adapter,
        Self::Encoder,
        Self::EncoderLoad,
        Self::KvLookup,
        Self::KvLoad,
        Self::StaleOutput,
        Self::SessionInput,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::TokenBudget => "token_budget",
            Self::MaxNumSeqs => "max_num_seqs",
            Self::Blocks => "blocks",
            Self::HeldBack => "held_back",
            Self::Pause => "pause",
            Self::Grammar => "grammar",
            Self::Adapter => "adapter",
            Self::Encoder => "encoder",
            Self::EncoderLoad => "encoder_load",
            Self::KvLookup => "kv_lookup",
            Self::KvLoad => "kv_load",
            Self::StaleOutput => "stale_output",
            Self::SessionInput => "session_input",
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_counted_in_its_own_place() {
        for (position, reason) in WaitReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, position, "{}", reason.name());
        }
    }
}
