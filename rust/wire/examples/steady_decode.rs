//! Steps of an unchanged batch, for `make bench KIND=instructions`: callgrind counts what [`schedule`],
//! [`update_from_output`] and [`message`] execute. The argument is the number of requests; the
//! number of steps is printed.

#[path = "../../core/tests/common/mod.rs"]
mod common;

use common::{Answers, config, new_request};
use sparksched_core::{
    BlockHasher, HashAlgorithm, KvCacheGroupConfig, NewRequest, RequestOutput, ScheduledOutput,
    ScheduledRequest, Scheduler, SchedulerConfig, StopConditions,
};
use sparksched_wire::{Envelope, Message, Output, RequestId, Stats};

const NUM_PROMPT_TOKENS: usize = 128;
const BLOCK_SIZE: u32 = 16;
/// Each request fills two blocks of each group meanwhile.
const NUM_STEPS: u32 = 2 * BLOCK_SIZE;
/// The window of gpt-oss's sliding attention.
const WINDOW: u32 = 128;
/// A token that takes five bytes, like most of a large vocabulary's.
const SAMPLED: i32 = 100_000;
/// Fields of vLLM's `EngineCoreOutput`.
const NUM_OUTPUT_FIELDS: usize = 18;

fn main() {
    let num_requests = std::env::args().nth(1).and_then(|it| it.parse().ok());
    let num_requests: usize = num_requests.expect("the number of requests is the argument");
    let mut scheduler = scheduler_of(num_requests);
    let ids: Vec<RequestId> =
        (0..num_requests).map(|id| RequestId::new(&format!("request-{id}"))).collect();

    // With asynchronous scheduling, a step is decided before the last one is done.
    let mut in_flight = first_step(&mut scheduler);
    let mut outputs = Vec::new();
    for _ in 0..NUM_STEPS {
        schedule(&mut scheduler);
        let next: Vec<ScheduledRequest> = scheduler.step().scheduled().copied().collect();
        assert_eq!(next.len(), num_requests, "all requests decode in each step");
        update_from_output(&mut scheduler, &in_flight, &mut outputs);
        assert!(message(&outputs, &ids) > num_requests);
        in_flight = next;
    }
    println!("{NUM_STEPS}");
}

#[inline(never)]
fn schedule(scheduler: &mut Scheduler) {
    let knobs = scheduler.config().step_knobs(false);
    let Ok(_) = scheduler.schedule(&knobs, 0.0, &mut Answers::default());
}

#[inline(never)]
fn update_from_output(
    scheduler: &mut Scheduler,
    step: &[ScheduledRequest],
    outputs: &mut Vec<RequestOutput>,
) {
    let scheduled = step.iter().map(|it| ScheduledOutput {
        index: Some(it.index),
        num_scheduled_tokens: it.num_tokens,
        sampled_tokens: &[SAMPLED],
        num_draft_tokens: 0,
        num_invalid_drafts: 0,
        is_pooled: false,
        is_void: false,
    });
    let Ok(()) = scheduler.update_from_output(scheduled, &mut Answers::default(), outputs);
}

/// Returns the message's length.
#[inline(never)]
fn message(outputs: &[RequestOutput], ids: &[RequestId]) -> usize {
    let mut message = Message::new(NUM_OUTPUT_FIELDS, 0);
    for output in outputs {
        message.push(&Output {
            request_id: &ids[output.position],
            new_token_ids: &[SAMPLED],
            news: output.news.as_deref(),
            finish_reason: None,
            num_nans_in_logits: 0,
        });
    }
    let envelope = Envelope {
        engine_index: 0,
        scheduler_stats: Stats::None,
        timestamp: 1.5,
        finished_requests: None,
        weight_version: Some("default"),
    };
    message.bytes(&envelope).len()
}

fn scheduler_of(num_requests: usize) -> Scheduler {
    let window = KvCacheGroupConfig::SlidingWindow {
        window: WINDOW,
        num_retained_tokens: 0,
        max_admission_blocks: u32::MAX,
    };
    let num_tokens = num_requests * NUM_PROMPT_TOKENS;
    let config = SchedulerConfig {
        async_scheduling: true,
        max_num_active_reqs: num_requests,
        max_num_scheduled_tokens: num_tokens as u32,
        max_num_batched_tokens: num_tokens as u32,
        max_model_len: 4096,
        block_size: BLOCK_SIZE,
        hash_block_size: BLOCK_SIZE,
        group_block_sizes: vec![BLOCK_SIZE; 2],
        num_blocks: num_tokens as u32,
        hasher: BlockHasher::new(HashAlgorithm::Sha256, BLOCK_SIZE, b"none"),
        ..config(vec![KvCacheGroupConfig::FullAttention, window], None)
    };
    let mut scheduler = Scheduler::new(config);
    for (id, token) in (0..num_requests).zip(0..) {
        let prompt = vec![token; NUM_PROMPT_TOKENS];
        let stop = StopConditions { max_tokens: u64::MAX, ..StopConditions::default() };
        scheduler.add_request(NewRequest { stop, ..new_request(id, &prompt) }, 0.0);
    }
    scheduler
}

/// Computes all prompts, so that every request decodes from then on.
fn first_step(scheduler: &mut Scheduler) -> Vec<ScheduledRequest> {
    let knobs = scheduler.config().step_knobs(false);
    let Ok(step) = scheduler.schedule(&knobs, 0.0, &mut Answers::default());
    step.scheduled().copied().collect()
}
