//! In which order requests are admitted: turns what is known of a request when it arrives into the
//! integer priority that vLLM's priority policy orders by. It mirrors nothing in vLLM, and each
//! decision after the arrival is vLLM's.
//!
//! - **Fair**: start-time fair queueing. A request costs tokens: those of the prompt that aren't
//!   cached, and the expected output. It starts, in virtual time, when its tenant's last one ends,
//!   but not before the present virtual time, which is the start of the latest request that was
//!   admitted. The start is the priority. What a request really cost is settled when it ends, with
//!   the tenant's next request.
//! - **Deadline**: earliest deadline first. Where the work ahead makes a deadline impossible, the
//!   request is due as much after its turn first come first served as it was ready to wait. So it
//!   lets those pass who can still be in time, and nobody starves.
//! - **Aging**: a client's priority counts as seconds of waiting.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::RequestIndex;

/// What an operator chooses.
#[derive(Clone, Debug, PartialEq)]
pub enum OrderSettings {
    /// By tenant; a tenant that isn't named here weighs 1. Weights are from 0.01 to 1000.
    Fair(BTreeMap<Box<str>, f64>),
    /// By deadline. A request that doesn't say has so many seconds to its first token.
    Deadline(f64),
    /// A priority of 1 counts as so many seconds of waiting.
    Aging(f64),
}

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
    pub(crate) index: RequestIndex,
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
    pub(crate) priority: i128,
    index: RequestIndex,
    tenant: Arc<str>,
    /// Tokens that it is expected to cost.
    cost: f64,
    /// It has been admitted, with so many cached tokens.
    num_cached_tokens: Option<u32>,
}

/// Gives arriving requests their priorities.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    settings: OrderSettings,
    /// Those with requests, or whose requests have cost more than those of others so far. Clients
    /// choose the names, so they are in a tree: no choice of names makes it slow.
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// Requests of all tenants that have not ended.
    num_unfinished: usize,
    mean_output: f64,
    /// With so many tenants, those to forget are looked for.
    sweep_at: usize,
    virtual_time: i128,
    queue: DeadlineQueue,
}

#[derive(Clone, Debug, Default)]
struct Tenant {
    weight: f64,
    /// Virtual time at which its last request ends.
    finish: i128,
    mean_output: f64,
    num_waiting: usize,
    num_unfinished: usize,
}

/// What an output is expected to be before the first one has ended, in tokens.
const FIRST_MEAN: f64 = 128.0;

/// How much the last output counts in a running mean.
const LAST_PART: f64 = 0.1;

const FIRST_SWEEP: usize = 64;

/// The largest priority that a client can ask for and be told apart from others: more would be
/// years of waiting.
const MOST_URGENT: i128 = 1_000_000_000;

impl Order {
    pub(crate) fn new(settings: OrderSettings) -> Self {
        let (tenants, queue) = Default::default();
        Self {
            settings,
            tenants,
            num_unfinished: 0,
            mean_output: FIRST_MEAN,
            sweep_at: FIRST_SWEEP,
            virtual_time: 0,
            queue,
        }
    }

    /// Decides a request's priority.
    #[expect(clippy::cast_precision_loss, reason = "limits of tokens, and bounded priorities")]
    pub(crate) fn rank(&mut self, arrival: &Arrival<'_>) -> Ticket {
        let name = &arrival.hints.tenant;
        let key = self.tenants.get_key_value(&**name).map(|(key, _)| Arc::clone(key));
        let key = key.unwrap_or_else(|| Arc::from(&**name));
        let mean_output = self.mean_output;
        let new = || Tenant { weight: 1.0, mean_output, ..Tenant::default() };
        let tenant = self.tenants.entry(Arc::clone(&key)).or_insert_with(new);
        self.num_unfinished += 1;
        tenant.num_unfinished += 1;
        tenant.num_waiting += 1;
        let num_output_tokens = tenant.mean_output.min(arrival.max_tokens as f64);
        let cost = f64::from(arrival.num_uncached_tokens) + num_output_tokens;
        let priority = match &self.settings {
            OrderSettings::Fair(weights) => {
                tenant.weight = weights.get(name).copied().unwrap_or(1.0);
                let start = tenant.finish.max(self.virtual_time);
                tenant.finish = start.saturating_add(virtual_cost(cost, tenant.weight));
                start
            }
            OrderSettings::Deadline(default_s) => {
                self.queue.enter(arrival, arrival.hints.ttft_s.unwrap_or(*default_s))
            }
            OrderSettings::Aging(s_per_priority) => {
                let priority = arrival.priority.clamp(-MOST_URGENT, MOST_URGENT) as f64;
                micros(arrival.time + priority * s_per_priority)
            }
        };
        let (index, tenant) = (arrival.index, key);
        Ticket { priority, index, tenant, cost, num_cached_tokens: None }
    }

    /// Takes in that a request is part of a step, for the first time or again, and how many of its
    /// tokens were cached.
    pub(crate) fn admit(&mut self, ticket: &mut Ticket, num_cached_tokens: u32, now: f64) {
        if ticket.num_cached_tokens.is_some() {
            return;
        }
        ticket.num_cached_tokens = Some(num_cached_tokens);
        self.virtual_time = self.virtual_time.max(ticket.priority);
        self.queue.admit(ticket, now);
        if let Some(tenant) = self.tenants.get_mut(&ticket.tenant) {
            tenant.num_waiting -= 1;
        }
    }

    /// Takes in that a request has ended after so many tokens, prompt and output, of which so many
    /// were output.
    pub(crate) fn end(&mut self, ticket: &Ticket, num_tokens: u32, num_output_tokens: u32) {
        let Some(tenant) = self.tenants.get_mut(&ticket.tenant) else { return };
        self.num_unfinished -= 1;
        tenant.num_unfinished -= 1;
        let mut actual = 0.0;
        if let Some(num_cached_tokens) = ticket.num_cached_tokens {
            actual = f64::from(num_tokens.saturating_sub(num_cached_tokens));
            for mean in [&mut tenant.mean_output, &mut self.mean_output] {
                *mean += LAST_PART * (f64::from(num_output_tokens) - *mean);
            }
        } else {
            tenant.num_waiting -= 1;
            self.queue.leave(ticket);
        }
        let correction = virtual_cost(actual - ticket.cost, tenant.weight);
        tenant.finish = tenant.finish.saturating_add(correction);
        self.forget_idle();
    }

    /// Forgets tenants without requests that owe nothing; not at each call, so that a call costs
    /// little, however many there are.
    fn forget_idle(&mut self) {
        if self.num_unfinished == 0 {
            // All start anew: nobody owes, and the numbers don't grow for ever.
            self.tenants.clear();
            self.virtual_time = 0;
        } else if self.tenants.len() >= self.sweep_at {
            self.tenants.retain(|_, it| it.num_unfinished > 0 || it.finish > self.virtual_time);
            self.sweep_at = FIRST_SWEEP.max(2 * self.tenants.len());
        }
    }

    /// The tenants that have requests; how many were never admitted, and how many haven't ended.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let all = self.tenants.iter().filter(|(_, it)| it.num_unfinished > 0);
        all.map(|(name, it)| (&**name, it.num_waiting, it.num_unfinished))
    }
}

/// Virtual time that tokens take, in thousandths of a token of a tenant that weighs 1.
///
/// At 100,000 tokens a second, all of one tenant of the least weight, priorities fit into 64 bits
/// for 29 years in which somebody always waits.
fn virtual_cost(num_tokens: f64, weight: f64) -> i128 {
    (1e3 * num_tokens / weight) as i128
}

fn micros(seconds: f64) -> i128 {
    // Within 64 bits, whatever a client's clock says.
    (1e6 * seconds).clamp(-9e18, 9e18) as i128
}

/// Who waits, by deadline, and how fast they come in. Empty without deadlines.
#[derive(Clone, Debug, Default)]
struct DeadlineQueue {
    /// Uncached tokens, by deadline in microseconds of the client's clock.
    waiting: BTreeMap<(i128, RequestIndex), f64>,
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
    /// Puts a request in; returns its deadline.
    fn enter(&mut self, arrival: &Arrival<'_>, ttft_s: f64) -> i128 {
        self.pass_time(arrival.now);
        let num_tokens = f64::from(arrival.num_uncached_tokens);
        let mut deadline = micros(arrival.time + ttft_s);
        if self.served_s >= LEAST_SEEN_S && self.served_tokens > 0.0 {
            let tokens_per_s = self.served_tokens / self.served_s;
            if !self.has_room(deadline, ttft_s * tokens_per_s - num_tokens) {
                let fcfs_s = (self.num_tokens + num_tokens) / tokens_per_s;
                deadline = micros(arrival.time + fcfs_s + ttft_s);
            }
        }
        self.waiting.insert((deadline, arrival.index), num_tokens);
        self.num_tokens += num_tokens;
        deadline
    }

    /// Whether what waits with an earlier deadline is no more than so many tokens. Takes as long as
    /// what can be in time, however many wait.
    fn has_room(&self, deadline: i128, mut num_tokens: f64) -> bool {
        let mut ahead = self.waiting.range(..=(deadline, RequestIndex(u32::MAX)));
        num_tokens >= 0.0
            && ahead.all(|(_, ahead)| {
                num_tokens -= ahead;
                num_tokens >= 0.0
            })
    }

    fn admit(&mut self, ticket: &Ticket, now: f64) {
        self.pass_time(now);
        let num_tokens = self.leave(ticket);
        if !self.waiting.is_empty() {
            self.served_tokens += num_tokens;
        }
    }

    fn leave(&mut self, ticket: &Ticket) -> f64 {
        let num_tokens = self.waiting.remove(&(ticket.priority, ticket.index)).unwrap_or(0.0);
        self.num_tokens = if self.waiting.is_empty() { 0.0 } else { self.num_tokens - num_tokens };
        num_tokens
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that costs 1,000 tokens.
    fn rank(order: &mut Order, number: u32, tenant: &str) -> Ticket {
        let hints = OrderHints { tenant: tenant.into(), ttft_s: None };
        order.rank(&Arrival {
            index: RequestIndex(number),
            hints: &hints,
            priority: 0,
            time: 0.0,
            num_uncached_tokens: 1_000,
            max_tokens: 0,
            now: 0.0,
        })
    }

    #[test]
    fn priorities_fit_into_64_bits_after_ten_years() {
        let mut order = Order::new(OrderSettings::Fair([("light".into(), 0.01)].into()));
        let first = rank(&mut order, 0, "light");
        // Of 100,000 tokens a second, all of this tenant.
        order.virtual_time = virtual_cost(1e5 * 3_653.0 * 86_400.0, 0.01);
        let [second, third] = [1, 2].map(|number| rank(&mut order, number, "light").priority);
        assert!(first.priority < second && second < third, "{second}, {third}");
        assert!(i64::try_from(third).is_ok(), "{third}");
    }

    #[test]
    fn tenants_are_forgotten_while_somebody_waits() {
        let mut order = Order::new(OrderSettings::Fair(BTreeMap::new()));
        rank(&mut order, 0, "waits");
        for number in 1..10_000 {
            // One tenant goes on, so that virtual time does; the others have one request each.
            for tenant in ["goes on", &*number.to_string()] {
                let mut ticket = rank(&mut order, number, tenant);
                order.admit(&mut ticket, 0, 0.0);
                order.end(&ticket, 1_000, 0);
            }
        }
        assert!(order.tenants.len() <= FIRST_SWEEP, "{}", order.tenants.len());
    }
}
