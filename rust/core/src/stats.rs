//! Numbers for `SchedulerStats` (vLLM's `v1/metrics/stats.py`).

/// Prefix cache lookups of admitted requests since the last time they were taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCacheStats {
    /// The prefix cache was reset.
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
    /// Counts one admission.
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

/// The state of the queues and of the block pool after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerStats {
    /// Requests that run.
    pub num_running_reqs: usize,
    /// Requests that wait for nothing but their turn.
    pub num_waiting_reqs: usize,
    /// Requests that wait for something else too, a grammar or the end of a stale step.
    pub num_skipped_waiting_reqs: usize,
    /// Share of blocks in use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Prefix cache lookups since the last call.
    pub prefix_cache_stats: PrefixCacheStats,
}
