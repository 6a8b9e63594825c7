//! What ends a request: the conditions of vLLM's `v1/core/sched/utils.py`.

/// A request stops when the tail of its output repeats itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepetitionDetection {
    /// Longest pattern looked for, in tokens.
    pub max_pattern_size: i64,
    /// Shortest pattern looked for, in tokens.
    pub min_pattern_size: i64,
    /// How many times it has to occur in a row.
    pub min_count: i64,
}

impl RepetitionDetection {
    /// Whether the tail of an output repeats itself so often.
    pub(crate) fn matches(self, output: &[i32]) -> bool {
        let shortest = self.min_pattern_size.max(1);
        if self.max_pattern_size <= 0 || self.min_count < 2 || shortest > self.max_pattern_size {
            return false;
        }
        let repeats = usize::try_from(self.min_count).unwrap_or(usize::MAX);
        let patterns =
            (shortest..=self.max_pattern_size).map_while(|size| usize::try_from(size).ok());
        patterns
            .take_while(|size| size.saturating_mul(repeats) <= output.len())
            .any(|size| ends_in_repeats(output, size, repeats))
    }
}

/// Whether the last `size` tokens occur `repeats` times in a row at the end of `output`.
fn ends_in_repeats(output: &[i32], size: usize, repeats: usize) -> bool {
    // A sequence has period `size` exactly if it equals itself shifted by `size`.
    let tail = &output[output.len() - size * repeats..];
    tail[size..] == tail[..tail.len() - size]
}

/// What ends a request, besides the model's maximum length.
#[derive(Clone, Debug, Default)]
pub struct StopConditions {
    /// The end-of-sequence token, unless it is ignored.
    pub eos_token_id: Option<i32>,
    /// Further tokens that end the request.
    pub stop_token_ids: Box<[i32]>,
    /// Below this many output tokens, repetition is not looked for.
    pub min_tokens: u64,
    /// Most output tokens.
    pub max_tokens: u64,
    /// Ends the request when it repeats itself.
    pub repetition: Option<Box<RepetitionDetection>>,
}

/// Why a request stopped, beyond its status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopReason {
    /// It did not stop, or its status says all.
    #[default]
    None,
    /// One of its stop tokens.
    Token(i32),
    /// Its output repeats itself.
    Repetition,
}
