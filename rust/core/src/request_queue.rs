//! Requests that wait: vLLM's `v1/core/sched/request_queue.py`.

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};

use crate::config::Policy;
use crate::ids::RequestIndex;
use crate::request::Request;

/// The queue of one of the two policies.
#[derive(Clone, Debug)]
pub enum RequestQueue {
    /// By arrival; what is prepended goes first.
    Fcfs(VecDeque<RequestIndex>),
    /// By urgency; there is no front to prepend to.
    Priority(BTreeMap<Urgency, RequestIndex>),
}

/// What priority scheduling orders by. Ids are unique, so no two requests are equal.
#[derive(Clone, Debug)]
pub struct Urgency {
    priority: i128,
    arrival_time: f64,
    id: Box<str>,
}

impl Urgency {
    fn of(request: &Request) -> Self {
        Self {
            priority: request.priority,
            arrival_time: request.arrival_time,
            id: request.id().into(),
        }
    }
}

impl Ord for Urgency {
    fn cmp(&self, other: &Self) -> Ordering {
        self.priority
            .cmp(&other.priority)
            .then_with(|| self.arrival_time.total_cmp(&other.arrival_time))
            .then_with(|| self.id.cmp(&other.id))
    }
}

impl PartialOrd for Urgency {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Urgency {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Urgency {}

impl RequestQueue {
    /// An empty queue.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        match policy {
            Policy::Fcfs => Self::Fcfs(VecDeque::new()),
            Policy::Priority => Self::Priority(BTreeMap::new()),
        }
    }

    /// Requests in the queue.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Fcfs(queue) => queue.len(),
            Self::Priority(queue) => queue.len(),
        }
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The request that is next.
    #[must_use]
    pub fn peek(&self) -> Option<RequestIndex> {
        match self {
            Self::Fcfs(queue) => queue.front().copied(),
            Self::Priority(queue) => queue.first_key_value().map(|(_, &index)| index),
        }
    }

    /// Takes out the request that is next.
    pub fn pop(&mut self) -> Option<RequestIndex> {
        match self {
            Self::Fcfs(queue) => queue.pop_front(),
            Self::Priority(queue) => queue.pop_first().map(|(_, index)| index),
        }
    }

    /// Adds a request where the policy wants it.
    pub fn add(&mut self, index: RequestIndex, request: &Request) {
        match self {
            Self::Fcfs(queue) => queue.push_back(index),
            Self::Priority(queue) => drop(queue.insert(Urgency::of(request), index)),
        }
    }

    /// Puts a request at the front, as far as the policy knows one.
    pub fn prepend(&mut self, index: RequestIndex, request: &Request) {
        match self {
            Self::Fcfs(queue) => queue.push_front(index),
            Self::Priority(queue) => drop(queue.insert(Urgency::of(request), index)),
        }
    }

    /// Takes out the given requests, those that are not there aside; `requests` finds their state.
    pub fn remove_all<'a>(
        &mut self,
        indices: &[RequestIndex],
        requests: impl Fn(RequestIndex) -> &'a Request,
    ) {
        match self {
            Self::Fcfs(queue) => match indices {
                [] => {}
                [one] => {
                    if let Some(position) = queue.iter().position(|index| index == one) {
                        queue.remove(position);
                    }
                }
                many => {
                    let mut leaving = many.to_vec();
                    leaving.sort_unstable();
                    queue.retain(|index| leaving.binary_search(index).is_err());
                }
            },
            Self::Priority(queue) => {
                for &index in indices {
                    queue.remove(&Urgency::of(requests(index)));
                }
            }
        }
    }

    /// The requests in the order in which they would be taken out.
    #[must_use]
    pub fn in_order(&self) -> Box<dyn Iterator<Item = RequestIndex> + '_> {
        match self {
            Self::Fcfs(queue) => Box::new(queue.iter().copied()),
            Self::Priority(queue) => Box::new(queue.values().copied()),
        }
    }
}
