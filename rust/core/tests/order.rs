//! Who is served when, with tenants, deadlines and priorities that age: lives on a device whose
//! steps take time, through the real scheduler.

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::{Answers, Chance, config, new_request};
use sparksched_core::{
    KvCacheGroupConfig, NewRequest, OrderSettings, Policy, RequestIndex, RequestStatus,
    ScheduledOutput, Scheduler, SchedulerConfig, StopConditions,
};

/// A request that a life brings in.
#[derive(Clone, Debug)]
struct Coming {
    at: f64,
    tenant: &'static str,
    num_prompt_tokens: usize,
    num_output_tokens: u64,
    priority: i128,
    ttft_s: Option<f64>,
}

fn coming(at: f64, tenant: &'static str) -> Coming {
    Coming { at, tenant, num_prompt_tokens: 64, num_output_tokens: 16, priority: 0, ttft_s: None }
}

/// What became of a request.
#[derive(Clone, Debug)]
struct Served {
    tenant: &'static str,
    at: f64,
    first_token_at: f64,
}

const STEP_S: f64 = 0.01;

/// A scheduler of four places and 64 tokens a step, and a clock.
struct Server {
    scheduler: Scheduler,
    now: f64,
    requests: BTreeMap<RequestIndex, (usize, Coming)>,
    served: Vec<(usize, Served)>,
    /// Tokens computed, by tenant and by second.
    tokens: BTreeMap<(&'static str, u64), u64>,
}

impl Server {
    fn new(settings: Option<OrderSettings>) -> Self {
        let config = SchedulerConfig {
            policy: if settings.is_some() { Policy::Priority } else { Policy::Fcfs },
            max_num_active_reqs: 4,
            num_blocks: 400,
            ..config(vec![KvCacheGroupConfig::FullAttention], None)
        };
        let mut scheduler = Scheduler::new(config);
        if let Some(settings) = settings {
            scheduler.order_by(settings);
        }
        let (requests, served, tokens) = Default::default();
        Self { scheduler, now: 0.0, requests, served, tokens }
    }

    fn add(&mut self, id: usize, coming: &Coming) {
        let tokens: Vec<i32> = (0..coming.num_prompt_tokens)
            .map(|at| i32::try_from(id * 1000 + at).unwrap())
            .collect();
        let request = NewRequest {
            priority: coming.priority,
            arrival_time: 1e9 + coming.at,
            stop: StopConditions {
                max_tokens: coming.num_output_tokens,
                ..StopConditions::default()
            },
            tenant: coming.tenant.into(),
            ttft_s: coming.ttft_s,
            ..new_request(id, &tokens)
        };
        let index = self.scheduler.add_request(request, self.now);
        self.requests.insert(index, (id, coming.clone()));
    }

    fn step(&mut self) {
        let knobs = self.scheduler.config().step_knobs(false);
        let Ok(step) = self.scheduler.schedule(&knobs, self.now, &mut Answers::default());
        let scheduled: Vec<_> = step.scheduled().copied().collect();
        self.now += STEP_S;
        let mut outputs = Vec::new();
        for it in &scheduled {
            let tenant = self.requests[&it.index].1.tenant;
            *self
                .tokens
                .entry((tenant, Duration::from_secs_f64(self.now).as_secs()))
                .or_default() += u64::from(it.num_tokens);
            let num_known = it.num_computed_tokens + it.num_tokens;
            let is_sampled = num_known as usize >= self.scheduler.request(it.index).num_tokens();
            outputs.push(ScheduledOutput {
                index: Some(it.index),
                num_scheduled_tokens: it.num_tokens,
                sampled_tokens: if is_sampled { &[7] } else { &[] },
                num_draft_tokens: 0,
                num_invalid_drafts: 0,
                is_pooled: false,
                is_void: false,
            });
        }
        let mut news = Vec::new();
        let Ok(()) = self.scheduler.update_from_output(
            outputs.into_iter(),
            &mut Answers::default(),
            &mut news,
        );
        for output in news {
            let (id, coming) = &self.requests[&output.index];
            if output.num_new_tokens > 0 && !self.served.iter().any(|(it, _)| it == id) {
                let served =
                    Served { tenant: coming.tenant, at: coming.at, first_token_at: self.now };
                self.served.push((*id, served));
            }
        }
    }

    /// Lives until `until`, and returns what became of whom.
    fn live(mut self, mut arrivals: Vec<Coming>, until: f64) -> Self {
        arrivals.sort_by(|one, other| one.at.total_cmp(&other.at));
        let mut next = 0;
        while self.now < until {
            while next < arrivals.len() && arrivals[next].at <= self.now {
                self.add(next, &arrivals[next]);
                next += 1;
            }
            self.step();
        }
        self.scheduler.check_invariants();
        self
    }

    fn tokens_of(&self, tenant: &str, seconds: std::ops::Range<u64>) -> f64 {
        let of_tenant =
            self.tokens.iter().filter(|((name, at), _)| *name == tenant && seconds.contains(at));
        f64::from(u32::try_from(of_tenant.map(|(_, count)| count).sum::<u64>()).unwrap())
    }

    fn longest_wait(&self, tenant: &str) -> f64 {
        let served = self.served.iter().filter(|(_, it)| it.tenant == tenant);
        served.map(|(_, it)| it.first_token_at - it.at).fold(0.0, f64::max)
    }
}

fn fair(weights: &[(&str, f64)]) -> OrderSettings {
    let weights = weights.iter().map(|&(name, weight)| (name.into(), weight)).collect();
    OrderSettings::Fair(weights)
}

/// A tenant that always has requests waiting: many at once, of random sizes.
fn backlog(tenant: &'static str, chance: &mut Chance, sizes: &[usize]) -> Vec<Coming> {
    let one = |_| Coming {
        num_prompt_tokens: chance.one_of(sizes),
        num_output_tokens: 1 + chance.below(40),
        ..coming(0.0, tenant)
    };
    (0..2000).map(one).collect()
}

#[test]
fn tenants_that_always_wait_get_their_shares() {
    for (gold_weight, share) in [(1.0, 0.5), (4.0, 0.8)] {
        for seed in 0..4 {
            let chance = &mut Chance::new(seed);
            // One has short requests, the other long ones: tokens count, not requests.
            let mut arrivals = backlog("gold", chance, &[16, 24, 200]);
            arrivals.extend(backlog("free", chance, &[100, 160, 200]));
            let server = Server::new(Some(fair(&[("gold", gold_weight)]))).live(arrivals, 21.0);
            for seconds in [1..11, 11..21] {
                let gold = server.tokens_of("gold", seconds.clone());
                let free = server.tokens_of("free", seconds);
                let got = gold / (gold + free);
                assert!((got - share).abs() < 0.05, "weight {gold_weight}, seed {seed}: {got}");
            }
        }
    }
}

#[test]
fn a_tenant_that_was_idle_waits_for_nobodys_backlog() {
    let mut arrivals = vec![coming(0.0, "burst"); 200];
    arrivals.extend((0..8).map(|second| coming(0.5 + f64::from(second), "quiet")));
    let vllms = Server::new(None).live(arrivals.clone(), 15.0);
    let ours = Server::new(Some(fair(&[]))).live(arrivals, 15.0);
    assert!(vllms.longest_wait("quiet") > 2.0, "{}", vllms.longest_wait("quiet"));
    // For a place of the four, whose requests take 20 steps at most.
    assert!(ours.longest_wait("quiet") < 0.3, "{}", ours.longest_wait("quiet"));
    // Nobody else pays for that.
    let last = |server: &Server| server.served.last().map(|(_, it)| it.first_token_at);
    assert_eq!(vllms.served.len(), ours.served.len());
    assert!(last(&ours).unwrap() <= last(&vllms).unwrap() * 1.02);
}

/// What was asked for and not taken is given back: aborted requests cost their tenant nothing.
#[test]
fn aborted_requests_cost_their_tenant_nothing() {
    let mut server = Server::new(Some(fair(&[])));
    // So that somebody always waits.
    (0..50).for_each(|id| server.add(id, &coming(0.0, "other")));
    (50..100).for_each(|id| server.add(id, &coming(0.0, "rash")));
    let rash = server.requests.iter().filter(|(_, (_, it))| it.tenant == "rash");
    let indices: Vec<RequestIndex> = rash.map(|(&index, _)| index).collect();
    let aborted = RequestStatus::FinishedAborted;
    let Ok(_) = server.scheduler.finish_requests(&indices, aborted, &mut Answers::default());
    server.add(100, &coming(0.0, "rash"));
    let before: Vec<RequestIndex> = server.scheduler.waiting();
    let place = before.iter().position(|it| server.requests[it].1.tenant == "rash");
    assert!(place < Some(2), "{place:?}");
}

#[test]
fn ten_thousand_tenants_are_served_in_turn_and_forgotten() {
    let mut server = Server::new(Some(fair(&[])));
    let names: Vec<&'static str> =
        (0..10_000).map(|number| &*format!("tenant\u{0}{number}").leak()).collect();
    for (id, name) in names.iter().enumerate() {
        server.add(id, &Coming { num_prompt_tokens: 4, num_output_tokens: 1, ..coming(0.0, name) });
    }
    assert_eq!(server.scheduler.tenants().count(), 10_000);
    while server.scheduler.num_unfinished_requests() > 0 {
        server.step();
    }
    assert_eq!(server.scheduler.tenants().count(), 0);
}

#[test]
fn what_can_be_in_time_is_and_what_cannot_pushes_nobody_out() {
    // 4,000 prompt tokens a second at most. Urgent requests want more than that for a second:
    // most can't be in time. Patient ones come a bit later, and can.
    let urgent = |at| Coming { ttft_s: Some(0.5), num_output_tokens: 1, ..coming(at, "urgent") };
    let patient = |at| Coming { ttft_s: Some(3.0), num_output_tokens: 1, ..coming(at, "patient") };
    let mut arrivals: Vec<Coming> = (0..400).map(|it| urgent(f64::from(it) * 0.005)).collect();
    arrivals.extend((0..100).map(|it| patient(2.0 + f64::from(it) * 0.02)));
    let server = Server::new(Some(OrderSettings::Deadline(10.0))).live(arrivals, 20.0);
    let in_time = |tenant: &str, ttft_s: f64| {
        let of_tenant = server.served.iter().filter(|(_, it)| it.tenant == tenant);
        of_tenant.filter(|(_, it)| it.first_token_at - it.at <= ttft_s).count()
    };
    assert_eq!(server.served.len(), 500);
    assert!(in_time("patient", 3.0) >= 95, "{}", in_time("patient", 3.0));
    assert!(in_time("urgent", 0.5) >= 150, "{}", in_time("urgent", 0.5));
    assert!(server.longest_wait("urgent") < 6.0, "{}", server.longest_wait("urgent"));
}

#[test]
fn low_priorities_age() {
    // Twice as many important requests as there is room for.
    let important = |it: u32| Coming { priority: -1, ..coming(f64::from(it) * 0.02, "important") };
    let mut arrivals: Vec<Coming> = (0..400).map(important).collect();
    arrivals.extend((0..4).map(|_| Coming { priority: 5, ..coming(0.0, "humble") }));
    let server = Server::new(Some(OrderSettings::Aging(0.25))).live(arrivals, 25.0);
    // 6 x 0.25 s behind those that came with it, and then before those that come later.
    let waited = server.longest_wait("humble");
    assert!(waited > 0.5 && waited < 4.0, "{waited}");
}

/// Ten years of a busy server: the clock neither overflows nor forgets who is next.
#[test]
fn virtual_time_does_not_overflow() {
    let mut server = Server::new(Some(fair(&[("light", 0.01)])));
    let huge = |tenant| Coming { num_output_tokens: u64::MAX, ..coming(f64::MAX, tenant) };
    let many = Coming { priority: i128::MAX, ..huge("light") };
    (0..100).for_each(|id| server.add(id, &many));
    server.add(100, &huge("other"));
    let first = server.scheduler.waiting()[1];
    assert_eq!(server.requests[&first].1.tenant, "other");
    for aging in [OrderSettings::Aging(1e6), OrderSettings::Deadline(1e18)] {
        let mut server = Server::new(Some(aging));
        server.add(0, &many);
        server.add(1, &Coming { priority: i128::MIN, ttft_s: Some(f64::MAX), ..huge("other") });
        server.step();
    }
}
