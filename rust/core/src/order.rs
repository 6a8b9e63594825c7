//! In which order requests are admitted: turns what is known of a request when it arrives into the
//! integer priority that vLLM's priority policy orders by. It mirrors nothing in vLLM, and each
//! decision after the arrival is vLLM's.
//!
//! - **Fair**: start-time fair queueing. A tenant's requests cost tokens: those of the prompt that
//!   aren't cached, and the expected output. A request starts, in virtual time, when its tenant's
//!   last one ends, but not before the present virtual time, which is the start of the latest
//!   request that was admitted. The start is the priority. What a request really cost is settled
//!   when it ends, with the tenant's next request.
//! - **Deadline**: earliest deadline first. Where the work ahead makes a deadline impossible, the
//!   request is due as much after its turn first come first served as it was ready to wait. So it
//!   lets those pass who can still be in time, and nobody starves.
//! - **Aging**: a client's priority counts as seconds of waiting.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// What an operator chooses.
#[derive(Clone, Debug, PartialEq)]
pub enum OrderSettings {
    /// By tenant; a tenant that isn't named here weighs 1. Weights are in [`WEIGHTS`].
    Fair(BTreeMap<Box<str>, f64>),
    /// By deadline. A request that doesn't say has so many seconds to its first token.
    Deadline(f64),
    /// A priority of 1 counts as so many seconds of waiting.
    Aging(f64),
}

/// What a tenant may weigh.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 0.01..=1000.0;

/// What a request says of its place in the order.
#[derive(Clone, Debug, Default)]
pub struct OrderHints {
    /// Whose it is.
    pub tenant: Box<str>,
    /// When its first token is due, in seconds from its arrival.
    pub ttft_s: Option<f64>,
}

/// What is known of a request when it arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) hints: &'a OrderHints,
    /// What its client asks for; smaller is more urgent.
    pub(crate) priority: i128,
    /// Seconds of the client's clock.
    pub(crate) time: f64,
    /// Tokens of its prompt that aren't cached.
    pub(crate) num_uncached_tokens: u32,
    /// The most tokens that it may get.
    pub(crate) max_tokens: u64,
    /// Now, in seconds of the scheduler's clock.
    pub(crate) now: f64,
}

/// What the order keeps with a request.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    /// Its priority.
    pub(crate) priority: i128,
    tenant: Arc<str>,
    /// Tokens that it is expected to cost.
    cost: f64,
    /// Tells apart what has the same priority.
    number: u64,
    /// It has been admitted, with so many cached tokens.
    num_cached_tokens: Option<u32>,
}

/// A tenant with requests, as it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantReading {
    /// Its name.
    pub name: Arc<str>,
    /// Requests that have never been admitted.
    pub num_waiting: usize,
    /// Requests that have not ended.
    pub num_unfinished: usize,
}

/// Gives arriving requests their priorities.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    rule: Rule,
    tenants: Tenants,
    next_number: u64,
}

#[derive(Clone, Debug)]
enum Rule {
    Fair { weights: BTreeMap<Box<str>, f64>, virtual_time: i128 },
    Deadline { default_ttft_s: f64, queue: DeadlineQueue },
    Aging { s_per_priority: f64 },
}

impl Order {
    pub(crate) fn new(settings: OrderSettings) -> Self {
        let rule = match settings {
            OrderSettings::Fair(weights) => Rule::Fair { weights, virtual_time: 0 },
            OrderSettings::Deadline(default_ttft_s) => {
                Rule::Deadline { default_ttft_s, queue: DeadlineQueue::default() }
            }
            OrderSettings::Aging(s_per_priority) => Rule::Aging { s_per_priority },
        };
        Self { rule, tenants: Tenants::default(), next_number: 0 }
    }

    /// Decides a request's priority.
    pub(crate) fn rank(&mut self, arrival: &Arrival<'_>) -> Ticket {
        let number = self.next_number;
        self.next_number += 1;
        let (name, tenant) = self.tenants.enter(&arrival.hints.tenant);
        let num_prompt_tokens = f64::from(arrival.num_uncached_tokens);
        let cost = num_prompt_tokens + tenant.expected_output(arrival.max_tokens);
        let (priority, cost) = match &mut self.rule {
            Rule::Fair { weights, virtual_time } => {
                let weight = weights.get(&arrival.hints.tenant).copied().unwrap_or(1.0);
                tenant.weight = weight;
                let start = tenant.finish.max(*virtual_time);
                tenant.finish = start.saturating_add(virtual_cost(cost, weight));
                (start, cost)
            }
            Rule::Deadline { default_ttft_s, queue } => {
                let ttft_s = arrival.hints.ttft_s.unwrap_or(*default_ttft_s);
                (queue.enter(number, arrival, ttft_s), num_prompt_tokens)
            }
            Rule::Aging { s_per_priority } => {
                #[expect(clippy::cast_precision_loss, reason = "exact within these bounds")]
                let priority = arrival.priority.clamp(-MOST_URGENT, MOST_URGENT) as f64;
                (micros(arrival.time + priority * *s_per_priority), cost)
            }
        };
        Ticket { priority, tenant: name, cost, number, num_cached_tokens: None }
    }

    /// Takes in that a request is part of a step, for the first time or again, and how many of its
    /// tokens were cached.
    pub(crate) fn admit(&mut self, ticket: &mut Ticket, num_cached_tokens: u32, now: f64) {
        if ticket.num_cached_tokens.is_some() {
            return;
        }
        ticket.num_cached_tokens = Some(num_cached_tokens);
        self.tenants.admit(&ticket.tenant);
        match &mut self.rule {
            Rule::Fair { virtual_time, .. } => *virtual_time = ticket.priority.max(*virtual_time),
            Rule::Deadline { queue, .. } => queue.admit(ticket, now),
            Rule::Aging { .. } => {}
        }
    }

    /// Takes in that a request has ended after so many tokens, prompt and output, of which so many
    /// were output.
    pub(crate) fn end(&mut self, ticket: &Ticket, num_tokens: u32, num_output_tokens: u32) {
        let actual = match ticket.num_cached_tokens {
            Some(num_cached) => f64::from(num_tokens.saturating_sub(num_cached)),
            None => 0.0,
        };
        if let (Rule::Deadline { queue, .. }, None) = (&mut self.rule, ticket.num_cached_tokens) {
            queue.leave(ticket);
        }
        self.tenants.end(ticket, actual, num_output_tokens);
        if let Rule::Fair { virtual_time, .. } = &mut self.rule {
            // With nobody left, all start anew: the numbers don't grow for ever.
            *virtual_time = if self.tenants.is_idle() { 0 } else { *virtual_time };
            self.tenants.forget_idle(*virtual_time);
        } else {
            self.tenants.forget_idle(i128::MAX);
        }
    }

    /// The tenants that have requests.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = TenantReading> {
        let with_requests = self.tenants.by_name.iter().filter(|(_, it)| it.num_unfinished > 0);
        with_requests.map(|(name, it)| TenantReading {
            name: Arc::clone(name),
            num_waiting: it.num_waiting,
            num_unfinished: it.num_unfinished,
        })
    }
}

/// The largest priority that a client can ask for and be told apart from others: more would be
/// years of waiting.
const MOST_URGENT: i128 = 1_000_000_000;

fn micros(seconds: f64) -> i128 {
    // Within 64 bits, whatever a client's clock says.
    (1e6 * seconds).clamp(-9e18, 9e18) as i128
}

/// Virtual time that tokens take, in thousandths of a token of a tenant that weighs 1.
///
/// At 100,000 tokens a second, all of one tenant of the least weight, priorities fit into 64 bits
/// for 29 years in which somebody always waits.
fn virtual_cost(num_tokens: f64, weight: f64) -> i128 {
    (1e3 * num_tokens / weight) as i128
}

#[derive(Clone, Debug)]
struct Tenant {
    weight: f64,
    /// Virtual time at which its last request ends.
    finish: i128,
    mean_output: f64,
    num_waiting: usize,
    num_unfinished: usize,
}

impl Tenant {
    #[expect(clippy::cast_precision_loss, reason = "a limit of tokens, or none to speak of")]
    fn expected_output(&self, max_tokens: u64) -> f64 {
        self.mean_output.min(max_tokens as f64)
    }
}

/// Tenants with requests, or whose requests have cost more than those of others so far.
///
/// Clients choose the names, so they are in a tree: no choice of names makes it slow.
#[derive(Clone, Debug)]
struct Tenants {
    by_name: BTreeMap<Arc<str>, Tenant>,
    num_unfinished: usize,
    mean_output: f64,
    /// With so many tenants, those that are idle are looked for.
    sweep_at: usize,
}

impl Default for Tenants {
    fn default() -> Self {
        let by_name = BTreeMap::new();
        Self { by_name, num_unfinished: 0, mean_output: FIRST_MEAN, sweep_at: FIRST_SWEEP }
    }
}

/// What an output is expected to be before the first one has ended, in tokens.
const FIRST_MEAN: f64 = 128.0;

/// How much the last output counts in a running mean.
const LAST_PART: f64 = 0.1;

const FIRST_SWEEP: usize = 64;

impl Tenants {
    fn enter(&mut self, name: &str) -> (Arc<str>, &mut Tenant) {
        self.num_unfinished += 1;
        let key = match self.by_name.get_key_value(name) {
            Some((key, _)) => Arc::clone(key),
            None => Arc::from(name),
        };
        let mean_output = self.mean_output;
        let tenant = self.by_name.entry(Arc::clone(&key)).or_insert_with(|| Tenant {
            weight: 1.0,
            finish: 0,
            mean_output,
            num_waiting: 0,
            num_unfinished: 0,
        });
        tenant.num_waiting += 1;
        tenant.num_unfinished += 1;
        (key, tenant)
    }

    fn admit(&mut self, name: &str) {
        if let Some(tenant) = self.by_name.get_mut(name) {
            tenant.num_waiting -= 1;
        }
    }

    fn end(&mut self, ticket: &Ticket, actual: f64, num_output_tokens: u32) {
        self.num_unfinished -= 1;
        let Some(tenant) = self.by_name.get_mut(&ticket.tenant) else { return };
        tenant.num_unfinished -= 1;
        let correction = virtual_cost(actual - ticket.cost, tenant.weight);
        tenant.finish = tenant.finish.saturating_add(correction);
        if ticket.num_cached_tokens.is_some() {
            let learn =
                |mean: &mut f64| *mean += LAST_PART * (f64::from(num_output_tokens) - *mean);
            learn(&mut tenant.mean_output);
            learn(&mut self.mean_output);
        } else {
            tenant.num_waiting -= 1;
        }
    }

    fn is_idle(&self) -> bool {
        self.num_unfinished == 0
    }

    /// Forgets tenants without requests that owe nothing at `virtual_time`; not at each call, so
    /// that a call costs little, however many there are.
    fn forget_idle(&mut self, virtual_time: i128) {
        if self.is_idle() {
            self.by_name.clear();
        } else if self.by_name.len() >= self.sweep_at {
            self.by_name.retain(|_, it| it.num_unfinished > 0 || it.finish > virtual_time);
            self.sweep_at = FIRST_SWEEP.max(2 * self.by_name.len());
        }
    }
}

/// Who waits, by deadline, and how fast they come in.
#[derive(Clone, Debug, Default)]
struct DeadlineQueue {
    /// Uncached tokens, by deadline and number.
    waiting: BTreeMap<(i128, u64), f64>,
    /// Their sum.
    num_tokens: f64,
    /// Tokens that came in while others waited, and how long that took; older ones count less.
    served_tokens: f64,
    served_s: f64,
    looked_at: f64,
}

/// After so many seconds of waiting what was seen counts a third.
const MEMORY_S: f64 = 30.0;

/// What was seen for less says nothing of speed.
const LEAST_SEEN_S: f64 = 0.25;

impl DeadlineQueue {
    /// Puts a request in; returns its deadline in microseconds of the client's clock.
    fn enter(&mut self, number: u64, arrival: &Arrival<'_>, ttft_s: f64) -> i128 {
        self.pass_time(arrival.now);
        let num_tokens = f64::from(arrival.num_uncached_tokens);
        let mut deadline = micros(arrival.time + ttft_s);
        if let Some(speed) = self.speed()
            && !self.fits(deadline, ttft_s * speed - num_tokens)
        {
            let fcfs_s = (self.num_tokens + num_tokens) / speed;
            deadline = micros(arrival.time + fcfs_s + ttft_s);
        }
        self.waiting.insert((deadline, number), num_tokens);
        self.num_tokens += num_tokens;
        deadline
    }

    /// Whether what waits with an earlier deadline is no more than `num_tokens`. Takes as long as
    /// what can be in time, however many wait.
    fn fits(&self, deadline: i128, num_tokens: f64) -> bool {
        let ahead = (Bound::Unbounded, Bound::Included((deadline, u64::MAX)));
        let mut left = num_tokens;
        left >= 0.0
            && self.waiting.range(ahead).all(|(_, num_tokens)| {
                left -= num_tokens;
                left >= 0.0
            })
    }

    fn admit(&mut self, ticket: &Ticket, now: f64) {
        self.pass_time(now);
        self.leave(ticket);
        if !self.waiting.is_empty() {
            self.served_tokens += ticket.cost;
        }
    }

    fn leave(&mut self, ticket: &Ticket) {
        if let Some(num_tokens) = self.waiting.remove(&(ticket.priority, ticket.number)) {
            self.num_tokens -= num_tokens;
        }
        if self.waiting.is_empty() {
            self.num_tokens = 0.0;
        }
    }

    fn pass_time(&mut self, now: f64) {
        let passed_s = (now - self.looked_at).max(0.0);
        self.looked_at = now;
        if !self.waiting.is_empty() {
            let kept = (-passed_s / MEMORY_S).exp();
            self.served_tokens *= kept;
            self.served_s = kept * self.served_s + passed_s;
        }
    }

    /// Tokens a second; `None` as long as too little was seen.
    fn speed(&self) -> Option<f64> {
        (self.served_s >= LEAST_SEEN_S && self.served_tokens > 0.0)
            .then(|| self.served_tokens / self.served_s)
    }
}
