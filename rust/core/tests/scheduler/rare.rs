//! Decisions that hang on one token or one block, which random lives seldom come to.

use crate::common::{Answers, config, new_request};
use sparksched_core::{
    ExternalHit, KvCacheGroupConfig, KvTransferConfig, NewRequest, RequestStatus, ScheduledOutput,
    Scheduler, SchedulerConfig, SessionInput, Speculation, StopConditions,
};

const NUM_DRAFTS: u32 = 3;

fn full_attention() -> SchedulerConfig {
    config(vec![KvCacheGroupConfig::FullAttention], None)
}

fn speculating() -> SchedulerConfig {
    let speculation = Speculation { num_spec_tokens: NUM_DRAFTS, ..Speculation::default() };
    SchedulerConfig { speculation, ..full_attention() }
}

fn request_for(max_tokens: u64, id: usize, tokens: &[i32]) -> NewRequest {
    let stop = StopConditions { max_tokens, ..StopConditions::default() };
    NewRequest { stop, ..new_request(id, tokens) }
}

/// Makes a step in which every request samples these tokens; returns how many tokens each got.
fn step(scheduler: &mut Scheduler, answers: &mut Answers, sampled: &[i32]) -> Vec<u32> {
    let knobs = scheduler.config().step_knobs(false);
    let Ok(step) = scheduler.schedule(&knobs, 0.0, answers);
    let scheduled: Vec<_> = step.scheduled().copied().collect();
    let outputs = scheduled.iter().map(|it| ScheduledOutput {
        index: Some(it.index),
        num_scheduled_tokens: it.num_tokens,
        sampled_tokens: sampled,
        num_draft_tokens: it.num_draft_tokens,
        num_invalid_drafts: 0,
        is_pooled: false,
        is_void: false,
    });
    let Ok(()) = scheduler.update_from_output(outputs, answers, &mut Vec::new());
    scheduler.check_invariants();
    scheduled.iter().map(|it| it.num_tokens).collect()
}

/// All drafts are accepted, and the first ends the turn: more is computed than there are tokens.
#[test]
fn a_session_that_stops_among_drafts_goes_on_at_its_last_token() {
    let mut scheduler = Scheduler::new(speculating());
    let answers = &mut Answers { has_next_turn: true, ..Answers::default() };
    let session = NewRequest { is_session: true, ..request_for(2, 0, &[0; 5]) };
    let index = scheduler.add_request(session, 0.0);
    assert_eq!(step(&mut scheduler, answers, &[1]), [5]);
    scheduler.set_drafts(index, &[1; NUM_DRAFTS as usize]);
    assert_eq!(step(&mut scheduler, answers, &[1; 1 + NUM_DRAFTS as usize]), [1 + NUM_DRAFTS]);
    assert_eq!(scheduler.request(index).status, RequestStatus::WaitingForInput);
    assert!(scheduler.request(index).num_computed_tokens as usize > 5 + 2);
    let input = SessionInput {
        tokens: vec![2],
        has_encoder_inputs: false,
        extra_keys: None,
        stop: StopConditions { max_tokens: 1, ..StopConditions::default() },
        arrival_time: 0.0,
        now: 0.0,
    };
    scheduler.continue_session(index, input);
    let request = scheduler.request(index);
    assert_eq!(request.num_computed_tokens as usize, request.num_tokens() - 1);
}

/// It would be padded to the size of those that verify drafts, for which the step has no room.
#[test]
fn a_padded_request_waits_for_a_step_that_has_room_for_its_padding() {
    let mut config = speculating();
    config.max_num_scheduled_tokens = 1 + NUM_DRAFTS;
    let mut scheduler = Scheduler::new(config);
    let answers = &mut Answers::default();
    let prompt = [0, 0, 0, 0, 1];
    scheduler.add_request(request_for(3, 0, &prompt), 0.0);
    assert_eq!(step(&mut scheduler, answers, &[]), [4]);
    assert_eq!(step(&mut scheduler, answers, &[1]), [1]);
    // All but its last token is cached.
    scheduler.add_request(request_for(3, 1, &prompt), 0.0);
    assert_eq!(step(&mut scheduler, answers, &[1]), [1]);
    assert_eq!(step(&mut scheduler, answers, &[1]), [1], "and the first request ends");
    assert_eq!(step(&mut scheduler, answers, &[1]), [1 + NUM_DRAFTS]);
}

/// Who loads holds its blocks and makes no progress: two of them could wait for each other.
#[test]
fn a_load_leaves_the_blocks_that_an_earlier_one_still_lacks() {
    let kv_transfer = Some(KvTransferConfig {
        defer_block_free: false,
        requires_kv_delivery: false,
        recompute_load_failures: true,
    });
    let num_blocks = 10;
    let config =
        SchedulerConfig { kv_transfer, num_blocks, reserve_full_isl: false, ..full_attention() };
    let mut scheduler = Scheduler::new(config);
    let answers = &mut Answers {
        external_hit: ExternalHit { num_tokens: 4, is_async: true },
        ..Answers::default()
    };
    // Nine blocks are free; the first needs ten of them in the end, and has one.
    let first = scheduler.add_request(request_for(3, 0, &[0; 40]), 0.0);
    let second = scheduler.add_request(request_for(3, 1, &[1; 5]), 0.0);
    assert_eq!(step(&mut scheduler, answers, &[]), [0; 0]);
    assert_eq!(scheduler.request(first).status, RequestStatus::WaitingForRemoteKvs);
    assert_eq!(scheduler.request(second).status, RequestStatus::Waiting);
}
