//! Numbers for `SchedulerStats` (vLLM's `v1/metrics/stats.py`).

/// Prefix cache lookups of admitted requests since the last time they were taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCacheStats {
    pub reset: bool,
    /// Requests admitted for the first time.
    pub requests: u64,
    /// Their tokens.
    pub queries: u64,
    /// Their tokens that were found in the cache.
    pub hits: u64,
    /// Requests admitted again after a preemption.
    pub preempted_requests: u64,
    /// Their tokens.
    pub preempted_queries: u64,
    /// Their tokens that were found in the cache.
    pub preempted_hits: u64,
}

impl PrefixCacheStats {
    pub fn record(&mut self, num_tokens: usize, num_hits: u32, preempted: bool) {
        let (requests, queries, hits) = if preempted {
            (&mut self.preempted_requests, &mut self.preempted_queries, &mut self.preempted_hits)
        } else {
            (&mut self.requests, &mut self.queries, &mut self.hits)
        };
        *requests += 1;
        *queries += num_tokens as u64;
        *hits += u64::from(num_hits);
    }
}

/// How the draft tokens of a step fared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecDecodingStats {
    /// Requests whose drafts were verified.
    pub num_drafts: u64,
    /// Their draft tokens.
    pub num_draft_tokens: u64,
    /// Of these, tokens that were accepted.
    pub num_accepted_tokens: u64,
    /// The same by position in the draft, as many as a request can have.
    pub num_accepted_tokens_per_pos: Vec<u64>,
    /// Drafts that reach each position.
    pub num_draft_tokens_per_pos: Vec<u64>,
}

impl SpecDecodingStats {
    /// Nothing yet, with room for drafts of `num_spec_tokens`.
    pub fn new(num_spec_tokens: u32) -> Self {
        let zeros = vec![0; num_spec_tokens as usize];
        Self {
            num_accepted_tokens_per_pos: zeros.clone(),
            num_draft_tokens_per_pos: zeros,
            ..Self::default()
        }
    }

    pub fn observe(&mut self, num_draft_tokens: u32, num_accepted_tokens: u32) {
        self.num_drafts += 1;
        self.num_draft_tokens += u64::from(num_draft_tokens);
        self.num_accepted_tokens += u64::from(num_accepted_tokens);
        let count = |positions: &mut [u64], num_tokens: u32| {
            positions.iter_mut().take(num_tokens as usize).for_each(|tokens| *tokens += 1);
        };
        count(&mut self.num_accepted_tokens_per_pos, num_accepted_tokens);
        count(&mut self.num_draft_tokens_per_pos, num_draft_tokens);
    }
}

/// How the draft tokens of one request fared, over its life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestSpecStats {
    /// Steps by the number of tokens that were accepted.
    pub histogram: Vec<u64>,
    pub num_draft_tokens: u64,
    /// Accepted and drafted tokens of each step, if that was asked for.
    pub per_step: Vec<(u32, u32)>,
}

impl RequestSpecStats {
    /// Nothing yet, with room for drafts of `num_spec_tokens`.
    pub fn new(num_spec_tokens: u32) -> Self {
        Self { histogram: vec![0; num_spec_tokens as usize + 1], ..Self::default() }
    }

    pub fn observe(&mut self, num_draft_tokens: u32, num_accepted_tokens: u32, in_detail: bool) {
        if let Some(steps) = self.histogram.get_mut(num_accepted_tokens as usize) {
            *steps += 1;
        }
        self.num_draft_tokens += u64::from(num_draft_tokens);
        if in_detail {
            self.per_step.push((num_accepted_tokens, num_draft_tokens));
        }
    }
}

/// The state of the queues and of the block pool after a step.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerStats {
    pub num_running_reqs: usize,
    /// Requests that wait for nothing but their turn.
    pub num_waiting_reqs: usize,
    /// Requests that wait for something else too, a grammar or the end of a stale step.
    pub num_skipped_waiting_reqs: usize,
    /// Share of blocks in use, 0 to 1; `None` if there are no blocks.
    pub kv_cache_usage: Option<f64>,
    /// Prefix cache lookups since the last call.
    pub prefix_cache_stats: PrefixCacheStats,
    /// How the draft tokens of the step that these belong to fared, if it had any.
    pub spec_decoding_stats: Option<SpecDecodingStats>,
}
