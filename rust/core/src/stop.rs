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

#[cfg(test)]
#[expect(clippy::cast_sign_loss, clippy::cast_possible_wrap, reason = "small test numbers")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, token by token, as vLLM words it.
    fn naive(output: &[i32], params: RepetitionDetection) -> bool {
        let min = params.min_pattern_size.max(1);
        if params.max_pattern_size <= 0 || params.min_count < 2 || min > params.max_pattern_size {
            return false;
        }
        for size in min..=params.max_pattern_size {
            if size * params.min_count > output.len() as i64 {
                return false;
            }
            let at = |back: i64| output[output.len() - back as usize];
            let repeats =
                (1..=size).all(|n| (1..params.min_count).all(|m| at(size * m + n) == at(n)));
            if repeats {
                return true;
            }
        }
        false
    }

    proptest! {
        #[test]
        fn repetition_equals_its_definition(
            output in prop::collection::vec(0..2i32, 0..24),
            max_pattern_size in -1..6i64,
            min_pattern_size in -1..6i64,
            min_count in 0..5i64,
        ) {
            let params = RepetitionDetection { max_pattern_size, min_pattern_size, min_count };
            prop_assert_eq!(params.matches(&output), naive(&output, params));
        }
    }
}
