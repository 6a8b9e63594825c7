//! Prefix hits against their definition: the longest prefix that every group can go on from, found
//! by trying all lengths.

use crate::common::{Answers, BLOCK_SIZE, config, new_request};
use proptest::prelude::*;
use sparksched_core::{GroupId, KvCacheGroupConfig, ScheduledOutput, Scheduler, StateMode};

/// Runs one request to its end.
fn serve(scheduler: &mut Scheduler, id: usize, tokens: &[i32]) {
    let index = scheduler.add_request(new_request(id, tokens), 0.0);
    while scheduler.get(index).is_some() {
        let knobs = scheduler.config().step_knobs(false);
        let Ok(step) = scheduler.schedule(&knobs, 0.0, &mut Answers::default());
        let scheduled: Vec<_> = step.scheduled().copied().collect();
        let sampled: Vec<Vec<i32>> = scheduled
            .iter()
            .map(|it| if scheduler.request(it.index).is_prefill_chunk { vec![] } else { vec![1] })
            .collect();
        let outputs = scheduled.iter().zip(&sampled).map(|(it, tokens)| ScheduledOutput {
            index: Some(it.index),
            num_scheduled_tokens: it.num_tokens,
            sampled_tokens: tokens,
            num_draft_tokens: 0,
            num_invalid_drafts: 0,
            is_pooled: false,
            is_void: false,
        });
        let Ok(()) =
            scheduler.update_from_output(outputs, &mut Answers::default(), &mut Vec::new());
        scheduler.check_invariants();
    }
}

/// Whether a request could go on after `length` blocks, by this group's cached blocks.
fn can_resume(group: KvCacheGroupConfig, is_cached: &[bool], length: usize) -> bool {
    match group {
        KvCacheGroupConfig::FullAttention => is_cached[..length].iter().all(|&cached| cached),
        KvCacheGroupConfig::SlidingWindow { window, .. } => {
            let need = (window - 1).div_ceil(BLOCK_SIZE) as usize;
            is_cached[length.saturating_sub(need)..length].iter().all(|&cached| cached)
        }
        KvCacheGroupConfig::ChunkedLocal { chunk_size, .. } => {
            let chunk = length as u32 * BLOCK_SIZE / chunk_size * chunk_size / BLOCK_SIZE;
            is_cached[chunk as usize..length].iter().all(|&cached| cached)
        }
        KvCacheGroupConfig::State { .. } => length == 0 || is_cached[length - 1],
        KvCacheGroupConfig::CircularBuffer => true,
    }
}

fn longest_hit_by_definition(scheduler: &Scheduler, tokens: &[i32]) -> usize {
    let config = scheduler.config();
    let hasher = config.hasher.as_ref().expect("caching is on");
    let mut hashes = Vec::new();
    hasher.extend_hashes(tokens, None, &mut hashes);
    let max_blocks = (tokens.len() - 1) / BLOCK_SIZE as usize;
    let pool = scheduler.kv_cache().pool();
    (0..=max_blocks)
        .rev()
        .find(|&length| {
            config.groups.iter().enumerate().all(|(id, &group)| {
                let is_cached = |hash| pool.find_cached(hash, GroupId(id as u32)).is_some();
                let is_cached: Vec<bool> = hashes.iter().map(is_cached).collect();
                can_resume(group, &is_cached, length)
            })
        })
        .expect("nothing is always a hit")
}

fn groups() -> impl Strategy<Value = Vec<KvCacheGroupConfig>> {
    let full = KvCacheGroupConfig::FullAttention;
    let state = KvCacheGroupConfig::State {
        mode: StateMode::All,
        num_speculative_blocks: 0,
        checkpoint_alignment: None,
    };
    let circular = KvCacheGroupConfig::CircularBuffer;
    let sliding = (2..20_u32).prop_map(|window| KvCacheGroupConfig::SlidingWindow {
        window,
        num_retained_tokens: 0,
        max_admission_blocks: 40,
    });
    prop_oneof![
        Just(vec![full]),
        sliding.clone().prop_map(|window| vec![window]),
        sliding.clone().prop_map(move |window| vec![window, full]),
        sliding.clone().prop_map(move |window| vec![full, window, window]),
        sliding.clone().prop_map(move |window| vec![state, full, window]),
        Just(vec![full, circular]),
        sliding.clone().prop_map(move |window| vec![circular, window]),
        sliding.clone().prop_map(move |window| vec![full, window, circular, circular]),
        (sliding.clone(), sliding).prop_map(move |(one, other)| vec![one, full, other]),
    ]
}

/// Prompts that share beginnings: each continues a random part of a common text.
fn prompts() -> impl Strategy<Value = Vec<Vec<i32>>> {
    let prompt = (0..60_i32, prop::collection::vec(0..3_i32, 1..20)).prop_map(|(shared, tail)| {
        let mut tokens: Vec<i32> = (100..100 + shared).collect();
        tokens.extend(tail);
        tokens
    });
    prop::collection::vec(prompt, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_hit_is_the_longest_that_all_groups_can_go_on_from(
        groups in groups(),
        retention_interval in prop_oneof![Just(None), Just(Some(0)), Just(Some(8))],
        prompts in prompts(),
    ) {
        let mut scheduler = Scheduler::new(config(groups, retention_interval));
        for (id, tokens) in prompts.iter().enumerate() {
            let expected = longest_hit_by_definition(&scheduler, tokens);
            let before = scheduler.take_stats().prefix_cache_stats;
            prop_assert_eq!(before.queries, 0);
            serve(&mut scheduler, id, tokens);
            let stats = scheduler.take_stats().prefix_cache_stats;
            prop_assert_eq!(stats.hits, u64::from(expected as u32 * BLOCK_SIZE));
        }
        let pool = scheduler.kv_cache().pool();
        prop_assert_eq!(pool.num_free() + 1, pool.num_blocks());
        prop_assert!(scheduler.reset_prefix_cache());
        prop_assert_eq!(scheduler.kv_cache().pool().cached_blocks().count(), 0);
    }
}

/// The circular buffer is one block more than the prompt has: it is counted, taken and given back.
#[test]
fn a_circular_buffer_is_one_block_for_all_of_a_request() {
    let groups = vec![KvCacheGroupConfig::FullAttention, KvCacheGroupConfig::CircularBuffer];
    let prompt: Vec<i32> = (0..16).collect();
    let num_blocks = 1 + prompt.len() as u32 / BLOCK_SIZE;
    let admitted = |num_free: u32| {
        let mut small = config(groups.clone(), None);
        small.num_blocks = 1 + num_free;
        let mut scheduler = Scheduler::new(small);
        let index = scheduler.add_request(new_request(0, &prompt), 0.0);
        let knobs = scheduler.config().step_knobs(false);
        let Ok(step) = scheduler.schedule(&knobs, 0.0, &mut Answers::default());
        let num_scheduled = step.scheduled().count();
        let tables = scheduler.request(index).groups.iter().map(|group| group.table.len());
        (num_scheduled, tables.collect::<Vec<_>>())
    };
    assert_eq!(admitted(num_blocks - 1), (0, vec![0, 0]));
    assert_eq!(admitted(num_blocks), (1, vec![4, 1]));
}

#[test]
fn a_request_that_does_not_fit_takes_no_blocks() {
    let mut small = config(vec![KvCacheGroupConfig::FullAttention], Some(0));
    small.num_blocks = 4;
    let mut scheduler = Scheduler::new(small);
    let index = scheduler.add_request(new_request(0, &[5; 40]), 0.0);
    let knobs = scheduler.config().step_knobs(false);
    let Ok(step) = scheduler.schedule(&knobs, 0.0, &mut Answers::default());
    assert_eq!(step.scheduled().count(), 0, "40 tokens don't fit into 3 blocks of 4");
    assert!(scheduler.request(index).groups[0].table.is_empty());
    assert_eq!(scheduler.kv_cache().pool().num_free(), 3);
}
