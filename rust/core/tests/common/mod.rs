//! What the tests of the scheduler share.
#![allow(dead_code, reason = "not every test uses everything")]

use std::convert::Infallible;

use sparksched_core::{
    AuxOutputs, Behaviors, BlockHasher, BlockId, BlockPool, EcConnector, EncoderInputs,
    ExternalAllocation, ExternalHit, Fallible, GrammarState, Grammars, HashAlgorithm,
    JournalConfig, KvCacheGroupConfig, KvConnector, NewRequest, NextTurn, Policy, Request,
    RequestIndex, SchedulerConfig, Sessions, Speculation, StateConfig, StopConditions,
};

pub const BLOCK_SIZE: u32 = 4;

/// A scheduler with these groups.
pub fn config(groups: Vec<KvCacheGroupConfig>, retention_interval: Option<u32>) -> SchedulerConfig {
    let mut lookup_groups: Vec<Vec<u32>> = Vec::new();
    for (id, group) in groups.iter().enumerate() {
        if *group == KvCacheGroupConfig::CircularBuffer {
            continue;
        }
        match lookup_groups.iter_mut().find(|ids| groups[ids[0] as usize] == *group) {
            Some(ids) => ids.push(id as u32),
            None => lookup_groups.push(vec![id as u32]),
        }
    }
    lookup_groups.sort_by_key(|ids| groups[ids[0] as usize] != KvCacheGroupConfig::FullAttention);
    SchedulerConfig {
        async_scheduling: false,
        policy: Policy::Fcfs,
        max_num_active_reqs: 8,
        max_num_scheduled_tokens: 64,
        max_num_batched_tokens: 64,
        max_model_len: 256,
        enable_chunked_prefill: true,
        long_prefill_token_threshold: 0,
        long_prefill_token_threshold_adaptive: false,
        reserve_full_isl: true,
        speculation: Speculation::default(),
        num_sampled_tokens_per_step: 1,
        max_loras: None,
        decode_stagger: 1,
        resume_as_new: true,
        sends_sampled_tokens: false,
        behaviors: Behaviors::default(),
        log_stats: true,
        block_size: BLOCK_SIZE,
        hash_block_size: BLOCK_SIZE,
        partial_hits: false,
        zeroes_blocks: false,
        group_block_sizes: vec![BLOCK_SIZE; groups.len()],
        states: StateConfig::default(),
        num_blocks: 120,
        watermark_blocks: 0,
        groups,
        lookup_groups,
        eagle_groups: vec![],
        retention_interval,
        journal: JournalConfig::default(),
        kv_transfer: None,
        transfers_encoder_outputs: false,
        collects_aux_output: false,
        hasher: BlockHasher::new(HashAlgorithm::Sha256, BLOCK_SIZE, b"none"),
    }
}

/// A request for three tokens.
pub fn new_request(id: usize, tokens: &[i32]) -> NewRequest {
    NewRequest {
        id: format!("request-{id}").into(),
        tokens: tokens.to_vec(),
        num_prompt_tokens: tokens.len(),
        stop: StopConditions { max_tokens: 3, ..StopConditions::default() },
        ..NewRequest::default()
    }
}

/// Answers the scheduler's questions always alike: nothing is held up.
#[derive(Default)]
pub struct Answers {
    /// Whether a session's next turn comes later; else there is none.
    pub has_next_turn: bool,
    pub external_hit: ExternalHit,
}

impl Fallible for Answers {
    type Error = Infallible;
}

impl Grammars for Answers {
    fn grammar_state(&mut self, _: RequestIndex) -> Result<GrammarState, Infallible> {
        Ok(GrammarState::Ready)
    }

    fn accept_tokens(&mut self, _: RequestIndex, _: &[i32], _: usize) -> Result<bool, Infallible> {
        Ok(true)
    }
}

impl Sessions for Answers {
    fn next_turn(&mut self, _: RequestIndex, _: &[i32], _: usize) -> Result<NextTurn, Infallible> {
        Ok(if self.has_next_turn { NextTurn::Pending } else { NextTurn::Closed })
    }
}

impl EncoderInputs for Answers {
    fn plan_encoder_inputs(&mut self, _: RequestIndex, _: u32, n: u32) -> Result<u32, Infallible> {
        Ok(n)
    }

    fn schedule_encoder_inputs(&mut self, _: &Request) -> Result<(), Infallible> {
        Ok(())
    }

    fn free_processed_encoder_inputs(&mut self, _: &Request, _: u32) -> Result<(), Infallible> {
        Ok(())
    }

    fn free_encoder_inputs(&mut self, _: RequestIndex) -> Result<(), Infallible> {
        Ok(())
    }
}

impl KvConnector for Answers {
    fn find_external_hit(
        &mut self,
        _: &Request,
        _: u32,
    ) -> Result<Option<ExternalHit>, Infallible> {
        Ok(Some(self.external_hit))
    }

    fn note_allocation(
        &mut self,
        _: &Request,
        _: &BlockPool,
        _: ExternalAllocation,
    ) -> Result<(), Infallible> {
        Ok(())
    }

    fn has_pending_block_frees(&mut self) -> Result<bool, Infallible> {
        Ok(false)
    }

    fn finish_request(&mut self, _: &Request, _: &[&[BlockId]]) -> Result<bool, Infallible> {
        Ok(false)
    }
}

impl EcConnector for Answers {
    fn has_encoder_outputs(&mut self, _: &Request, _: i64) -> Result<bool, Infallible> {
        Ok(true)
    }

    fn end_encoder_transfer(&mut self, _: &Request) -> Result<bool, Infallible> {
        Ok(false)
    }
}

impl AuxOutputs for Answers {
    fn max_prefix_hit(&mut self, _: &Request, _: &mut BlockPool) -> Result<u32, Infallible> {
        Ok(u32::MAX)
    }

    fn cap_external_hit(
        &mut self,
        _: &Request,
        _: &mut BlockPool,
        _: u32,
        num_external_tokens: i32,
    ) -> Result<i32, Infallible> {
        Ok(num_external_tokens)
    }

    fn note_load(&mut self, _: &Request) -> Result<(), Infallible> {
        Ok(())
    }

    fn end_aux_output(&mut self, _: &Request, _: &mut BlockPool) -> Result<(), Infallible> {
        Ok(())
    }

    fn take_aux_output(&mut self, _: &Request) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Random numbers that a seed decides: `SplitMix64`.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}
