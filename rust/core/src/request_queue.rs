//! Requests that wait: vLLM's `v1/core/sched/request_queue.py`.

use std::collections::VecDeque;

use crate::config::Policy;
use crate::ids::RequestIndex;
use crate::request::Request;
use crate::slots::Slots;

/// The queue of one of the two policies.
#[derive(Clone, Debug)]
pub enum RequestQueue {
    /// By arrival; what is prepended goes first.
    Fcfs(VecDeque<RequestIndex>),
    /// By urgency; there is no front to prepend to.
    Priority(UrgencyHeap),
}

impl RequestQueue {
    pub fn new(policy: Policy) -> Self {
        match policy {
            Policy::Fcfs => Self::Fcfs(VecDeque::new()),
            Policy::Priority => Self::Priority(UrgencyHeap::default()),
        }
    }
    pub fn len(&self) -> usize {
        match self {
            Self::Fcfs(queue) => queue.len(),
            Self::Priority(heap) => heap.0.len(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn peek(&self) -> Option<RequestIndex> {
        match self {
            Self::Fcfs(queue) => queue.front().copied(),
            Self::Priority(heap) => heap.0.first().map(|it| it.index),
        }
    }

    /// The first requests, so many at most. By urgency they are only roughly the first: a heap is
    /// sorted as it is emptied.
    pub fn roughly_first(&self, limit: usize) -> impl Iterator<Item = RequestIndex> {
        let (queue, heap) = match self {
            Self::Fcfs(queue) => (Some(queue), None),
            Self::Priority(heap) => (None, Some(&heap.0)),
        };
        let by_urgency = heap.into_iter().flatten().map(|it| it.index);
        queue.into_iter().flatten().copied().chain(by_urgency).take(limit)
    }

    /// The first of the requests that are wanted, in the order of [`Self::pop`]: those before it are
    /// looked at, and no others.
    pub fn find(
        &self,
        slots: &Slots,
        is_wanted: impl Fn(RequestIndex) -> bool,
    ) -> Option<RequestIndex> {
        match self {
            Self::Fcfs(queue) => queue.iter().copied().find(|&index| is_wanted(index)),
            Self::Priority(heap) => heap.find(slots, is_wanted),
        }
    }

    pub fn pop(&mut self, slots: &Slots) -> Option<RequestIndex> {
        match self {
            Self::Fcfs(queue) => queue.pop_front(),
            Self::Priority(heap) => heap.pop(slots),
        }
    }

    /// Adds a request where the policy wants it.
    pub fn add(&mut self, index: RequestIndex, slots: &Slots) {
        match self {
            Self::Fcfs(queue) => queue.push_back(index),
            Self::Priority(heap) => heap.push(index, slots),
        }
    }

    /// Puts a request at the front, as far as the policy knows one.
    pub fn prepend(&mut self, index: RequestIndex, slots: &Slots) {
        match self {
            Self::Fcfs(queue) => queue.push_front(index),
            Self::Priority(heap) => heap.push(index, slots),
        }
    }

    /// Puts these requests at the front, in their order; others aside. Returns the queue as it was,
    /// or nothing if it stays: by urgency there is no front.
    pub fn bring_forward(&mut self, first: &[RequestIndex]) -> Vec<RequestIndex> {
        let Self::Fcfs(queue) = self else { return Vec::new() };
        let before: Vec<RequestIndex> = queue.iter().copied().collect();
        let is_there = has(&before);
        let mut moved: Vec<RequestIndex> = first.iter().copied().filter(is_there).collect();
        if moved.is_empty() {
            return moved;
        }
        let is_moved = has(&moved);
        queue.retain(|it| !is_moved(it));
        while let Some(index) = moved.pop() {
            queue.push_front(index);
        }
        before
    }

    /// Puts those that are still there back where they were; others stay in front of them.
    pub fn put_back(&mut self, before: &[RequestIndex]) {
        let Self::Fcfs(queue) = self else { return };
        if before.is_empty() {
            return;
        }
        let (is_left, was_there) = (has(queue.make_contiguous()), has(before));
        queue.retain(|it| !was_there(it));
        queue.extend(before.iter().filter(|it| is_left(it)));
    }

    /// Takes out the given requests, those that are not there aside.
    pub fn remove_all(&mut self, indices: &[RequestIndex], slots: &Slots) {
        let is_leaving = has(indices);
        let stays = |index: &RequestIndex| !is_leaving(index);
        match self {
            Self::Fcfs(queue) => queue.retain(stays),
            Self::Priority(heap) => {
                heap.0.retain(|it| stays(&it.index));
                heap.restore(slots);
            }
        }
    }

    /// Takes notice of a request's new arrival time, if it is there. It stays where it is.
    pub fn note_arrival(&mut self, index: RequestIndex, slots: &Slots) {
        let Self::Priority(UrgencyHeap(heap)) = self else { return };
        if let Some(place) = heap.iter_mut().find(|it| it.index == index) {
            place.arrival_time = slots[index].arrival_time;
        }
    }

    /// The requests in the order in which they would be taken out.
    pub fn in_order(&self, slots: &Slots) -> Vec<RequestIndex> {
        match self {
            Self::Fcfs(queue) => queue.iter().copied().collect(),
            Self::Priority(heap) => {
                let mut heap = heap.clone();
                std::iter::from_fn(|| heap.pop(slots)).collect()
            }
        }
    }
}

/// Whether requests are among these, however many there are.
pub fn has(those: &[RequestIndex]) -> impl Fn(&RequestIndex) -> bool + use<> {
    let mut sorted = those.to_vec();
    sorted.sort_unstable();
    move |index| sorted.binary_search(index).is_ok()
}

/// A binary heap, the most urgent request first: smaller `(priority, arrival time, id)`.
///
/// A session's arrival time changes while it waits, and vLLM leaves it where it is in its heap. So
/// that the order then is vLLM's too, this is the algorithm of Python's `heapq`, step by step. When a
/// request leaves that is not the first one, that is to build the heap anew.
#[derive(Clone, Debug, Default)]
pub struct UrgencyHeap(Vec<Place>);

/// A request, and what it is ordered by: where many wait, to look into each takes far longer.
#[derive(Clone, Copy, Debug)]
struct Place {
    priority: i128,
    arrival_time: f64,
    index: RequestIndex,
}

fn is_more_urgent(one: &Place, other: &Place, slots: &Slots) -> bool {
    one.priority
        .cmp(&other.priority)
        .then_with(|| one.arrival_time.total_cmp(&other.arrival_time))
        .then_with(|| slots[one.index].id().cmp(slots[other.index].id()))
        .is_lt()
}

impl UrgencyHeap {
    fn push(&mut self, index: RequestIndex, slots: &Slots) {
        let Request { priority, arrival_time, .. } = slots[index];
        self.0.push(Place { priority, arrival_time, index });
        self.move_up(0, self.0.len() - 1, slots);
    }

    fn pop(&mut self, slots: &Slots) -> Option<RequestIndex> {
        let last = self.0.pop()?;
        let Some(first) = self.0.first_mut() else { return Some(last.index) };
        let popped = std::mem::replace(first, last);
        self.move_down(0, slots);
        Some(popped.index)
    }

    /// The most urgent of the requests that are wanted. Below one of them nobody is looked at.
    fn find(
        &self,
        slots: &Slots,
        is_wanted: impl Fn(RequestIndex) -> bool,
    ) -> Option<RequestIndex> {
        let mut first: Option<&Place> = None;
        let mut positions = vec![0];
        while let Some(position) = positions.pop() {
            let Some(place) = self.0.get(position) else { continue };
            if !is_wanted(place.index) {
                positions.extend([2 * position + 1, 2 * position + 2]);
            } else if first.is_none_or(|first| is_more_urgent(place, first, slots)) {
                first = Some(place);
            }
        }
        first.map(|it| it.index)
    }

    /// Makes a heap of requests in whatever order.
    fn restore(&mut self, slots: &Slots) {
        for position in (0..self.0.len() / 2).rev() {
            self.move_down(position, slots);
        }
    }

    /// Moves a request up to its place between `top` and where it is.
    fn move_up(&mut self, top: usize, mut position: usize, slots: &Slots) {
        while position > top {
            let parent = (position - 1) / 2;
            if !is_more_urgent(&self.0[position], &self.0[parent], slots) {
                break;
            }
            self.0.swap(position, parent);
            position = parent;
        }
    }

    /// Moves a request down to the leaves along the more urgent children, and up again to its place.
    fn move_down(&mut self, top: usize, slots: &Slots) {
        let mut position = top;
        loop {
            let (left, right) = (2 * position + 1, 2 * position + 2);
            if left >= self.0.len() {
                break;
            }
            let takes_left =
                right >= self.0.len() || is_more_urgent(&self.0[left], &self.0[right], slots);
            let child = if takes_left { left } else { right };
            self.0.swap(position, child);
            position = child;
        }
        self.move_up(top, position, slots);
    }
}
