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
use crate::request::Request;

/// What an operator chooses.
#[derive(Clone, Debug, PartialEq)]
pub enum OrderSettings {
    /// By tenant; a tenant that isn't named here weighs 1. Weights are from 0.01 to 1000.
    Fair(BTreeMap<String, f64>),
    /// By deadline. A request that doesn't say has so many seconds to its first token.
    Deadline(f64),
    /// A priority of 1 counts as so many seconds of waiting.
    Aging(f64),
}

/// Gives arriving requests their priorities.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    settings: OrderSettings,
    /// Those with requests, or whose requests have cost more than those of others so far. Clients
    /// choose the names, so they are in a tree: no choice of names makes it slow.
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// Of requests that have not ended.
    tickets: BTreeMap<RequestIndex, Ticket>,
    mean_output: f64,
    /// With so many tenants, those to forget are looked for.
    sweep_at: usize,
    virtual_time: i128,
    queue: DeadlineQueue,
}

#[derive(Clone, Debug)]
struct Ticket {
    tenant: Arc<str>,
    /// Tokens that the request is expected to cost.
    cost: f64,
    /// It has been admitted, with so many cached tokens.
    num_cached_tokens: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct Tenant {
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

impl Order {
    pub(crate) fn new(settings: OrderSettings) -> Self {
        let (tenants, tickets, virtual_time, queue) = Default::default();
        let (mean_output, sweep_at) = (FIRST_MEAN, FIRST_SWEEP);
        Self { settings, tenants, tickets, mean_output, sweep_at, virtual_time, queue }
    }

    /// Decides the priority of a request that arrives, of which so many tokens are cached.
    #[expect(
        clippy::cast_precision_loss,
        reason = "limits of tokens, and what would be years of waiting"
    )]
    pub(crate) fn rank(
        &mut self,
        request: &Request,
        (name, ttft_s): (Arc<str>, Option<f64>),
        num_cached_tokens: u32,
        now: f64,
    ) -> i128 {
        let weight = self.weight_of(&name);
        let mean_output = self.mean_output;
        let new = || Tenant { mean_output, ..Tenant::default() };
        let tenant = self.tenants.entry(Arc::clone(&name)).or_insert_with(new);
        tenant.num_unfinished += 1;
        tenant.num_waiting += 1;
        let num_uncached = f64::from(request.num_tokens() as u32 - num_cached_tokens);
        let max_tokens = request.stop_conditions().max_tokens as f64;
        let cost = num_uncached + tenant.mean_output.min(max_tokens);
        let priority = match self.settings {
            OrderSettings::Fair(_) => {
                let start = tenant.finish.max(self.virtual_time);
                tenant.finish = start.saturating_add(virtual_cost(cost, weight));
                start
            }
            OrderSettings::Deadline(default_s) => {
                self.queue.enter(request, ttft_s.unwrap_or(default_s), num_uncached, now)
            }
            OrderSettings::Aging(s_per_priority) => {
                micros(request.arrival_time + request.priority as f64 * s_per_priority)
            }
        };
        let ticket = Ticket { tenant: name, cost, num_cached_tokens: None };
        self.tickets.insert(request.index(), ticket);
        priority
    }

    fn weight_of(&self, tenant: &str) -> f64 {
        let OrderSettings::Fair(weights) = &self.settings else { return 1.0 };
        weights.get(tenant).copied().unwrap_or(1.0)
    }

    /// Takes in that a request is part of a step, for the first time or again; its computed tokens
    /// were cached.
    pub(crate) fn admit(&mut self, request: &Request, now: f64) {
        let ticket = self.tickets.get_mut(&request.index());
        let Some(ticket) = ticket.filter(|it| it.num_cached_tokens.is_none()) else { return };
        ticket.num_cached_tokens = Some(request.num_computed_tokens);
        self.virtual_time = self.virtual_time.max(request.priority);
        self.queue.admit(request, now);
        if let Some(tenant) = self.tenants.get_mut(&ticket.tenant) {
            tenant.num_waiting -= 1;
        }
    }

    /// Settles what a request has cost that has ended.
    pub(crate) fn end(&mut self, request: &Request) {
        let Some(ticket) = self.tickets.remove(&request.index()) else { return };
        let weight = self.weight_of(&ticket.tenant);
        let Some(tenant) = self.tenants.get_mut(&ticket.tenant) else { return };
        tenant.num_unfinished -= 1;
        let mut actual = 0.0;
        if let Some(num_cached_tokens) = ticket.num_cached_tokens {
            let num_output = request.num_output_tokens() as u32;
            let num_tokens = request.num_tokens() as u32;
            let num_tokens = if num_output == 0 { request.num_computed_tokens } else { num_tokens };
            actual = f64::from(num_tokens.saturating_sub(num_cached_tokens));
            for mean in [&mut tenant.mean_output, &mut self.mean_output] {
                *mean += LAST_PART * (f64::from(num_output) - *mean);
            }
        } else {
            tenant.num_waiting -= 1;
            self.queue.leave(request);
        }
        let correction = virtual_cost(actual - ticket.cost, weight);
        tenant.finish = tenant.finish.saturating_add(correction);
        self.forget_idle();
    }

    /// Forgets tenants without requests that owe nothing; not at each call, so that a call costs
    /// little, however many there are.
    fn forget_idle(&mut self) {
        if self.tickets.is_empty() {
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
    // Within 64 bits, whatever a client's clock and its priority say.
    (1e6 * seconds).clamp(-9e18, 9e18) as i128
}

/// Who waits, by deadline, and how fast they come in. Empty without deadlines.
#[derive(Clone, Debug, Default)]
struct DeadlineQueue {
    /// Uncached tokens, by deadline in microseconds of the client's clock.
    waiting: BTreeMap<(i128, RequestIndex), f64>,
    /// Their sum.
    num_tokens: f64,
    /// Tokens that came in since then, while others waited.
    served_tokens: f64,
    since: f64,
}

/// After twice so many seconds of waiting, what was seen counts as much as so many seconds.
const MEMORY_S: f64 = 30.0;

/// What was seen for less says nothing of speed.
const LEAST_SEEN_S: f64 = 0.25;

impl DeadlineQueue {
    /// Puts a request in; returns its deadline.
    fn enter(&mut self, request: &Request, ttft_s: f64, num_tokens: f64, now: f64) -> i128 {
        if self.waiting.is_empty() {
            (self.num_tokens, self.served_tokens, self.since) = (0.0, 0.0, now);
        }
        let mut deadline = micros(request.arrival_time + ttft_s);
        let seen_s = now - self.since;
        if seen_s >= LEAST_SEEN_S && self.served_tokens > 0.0 {
            let tokens_per_s = self.served_tokens / seen_s;
            if !self.has_room(deadline, ttft_s * tokens_per_s - num_tokens) {
                let fcfs_s = (self.num_tokens + num_tokens) / tokens_per_s;
                deadline = micros(request.arrival_time + fcfs_s + ttft_s);
            }
        }
        self.waiting.insert((deadline, request.index()), num_tokens);
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

    fn admit(&mut self, request: &Request, now: f64) {
        self.served_tokens += self.leave(request);
        let seen_s = now - self.since;
        if seen_s > 2.0 * MEMORY_S {
            self.served_tokens *= MEMORY_S / seen_s;
            self.since = now - MEMORY_S;
        }
    }

    fn leave(&mut self, request: &Request) -> f64 {
        let num_tokens = self.waiting.remove(&(request.priority, request.index())).unwrap_or(0.0);
        self.num_tokens -= num_tokens;
        num_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{NewRequest, NumGroups};

    /// A request that costs 1,000 tokens, and its priority.
    fn rank(order: &mut Order, number: u32, tenant: &str) -> Request {
        let new = NewRequest { tokens: vec![0; 1_000], ..NewRequest::default() };
        let groups = NumGroups { num_tables: 0, num_states: 0 };
        let mut request = Request::new(new, RequestIndex(number), groups);
        request.priority = order.rank(&request, (tenant.into(), None), 0, 0.0);
        request
    }

    #[test]
    fn priorities_fit_into_64_bits_after_ten_years() {
        let mut order = Order::new(OrderSettings::Fair([("light".into(), 0.01)].into()));
        let first = rank(&mut order, 0, "light").priority;
        // Of 100,000 tokens a second, all of this tenant.
        order.virtual_time = virtual_cost(1e5 * 3_653.0 * 86_400.0, 0.01);
        let [second, third] = [1, 2].map(|number| rank(&mut order, number, "light").priority);
        assert!(first < second && second < third, "{second}, {third}");
        assert!(i64::try_from(third).is_ok(), "{third}");
    }

    #[test]
    fn tenants_are_forgotten_while_somebody_waits() {
        let mut order = Order::new(OrderSettings::Fair(BTreeMap::new()));
        rank(&mut order, 0, "waits");
        for number in 1..10_000 {
            // One tenant goes on, so that virtual time does; the others have one request each.
            for tenant in ["goes on", &*number.to_string()] {
                let mut request = rank(&mut order, number, tenant);
                order.admit(&request, 0.0);
                request.num_computed_tokens = 1_000;
                order.end(&request);
            }
        }
        assert!(order.tenants.len() <= FIRST_SWEEP, "{}", order.tenants.len());
    }
}
