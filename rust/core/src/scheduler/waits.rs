//! What requests wait for, and for how long at most. Looking changes nothing that a decision depends
//! on.
//!
//! A request that a step skipped has a reason of its own. A step looks at none behind the one at which
//! it stops: they wait for the same as that one.

use super::{PauseState, Scheduler};
use crate::ids::RequestIndex;
use crate::kv_cache_manager::BlockShortfall;
use crate::request::RequestStatus;
use crate::request_queue::RequestQueue;
use crate::wait_reason::{WaitCounts, WaitReason};

/// The first request of the queue that waits for the server, and not for its client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadOfQueue {
    pub index: RequestIndex,
    pub reason: WaitReason,
}

/// Who holds blocks. One that several hold counts for the first of them in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockHolders {
    /// All blocks but the null block.
    pub num_blocks: u32,
    /// Blocks that nobody holds, cached or not.
    pub num_free: u32,
    /// Held by requests that run.
    pub num_running: u32,
    /// Held by sessions between two turns.
    pub num_sessions: u32,
    /// Held by requests that wait, all others: their KV is being loaded, or was.
    pub num_waiting: u32,
    /// Held for those that have ended: they are being sent, or steps in flight write them.
    pub num_ended: u32,
}

impl Scheduler {
    /// Notes what a request waits for that was skipped, or waits for more than its turn.
    pub(super) fn defer(&mut self, index: RequestIndex, reason: WaitReason) {
        if let Some(before) = self.slots[index].deferred_by.replace(reason) {
            self.deferred.remove(before);
        }
        self.deferred.add(reason);
    }

    /// Notes what keeps a request, and with it those behind it, from being admitted.
    pub(super) fn hold_up(&mut self, index: RequestIndex, reason: WaitReason) {
        self.held_up_by = Some(reason);
        // A session between two turns waits for its client, whatever else is in the way.
        let before = self.request(index).deferred_by;
        if before.is_some_and(|before| before != WaitReason::SessionInput) {
            self.defer(index, reason);
        }
    }

    pub fn wait_counts(&self) -> WaitCounts {
        let mut counts = self.deferred;
        let num_others = self.num_waiting() - counts.total();
        counts.add_many(self.reason_of_others(), num_others);
        counts
    }

    pub fn wait_reason(&self, index: RequestIndex) -> WaitReason {
        self.request(index).deferred_by.unwrap_or_else(|| self.reason_of_others())
    }

    /// What those wait for that have no reason of their own.
    fn reason_of_others(&self) -> WaitReason {
        match self.pause_state {
            PauseState::Unpaused => self.held_up_by.unwrap_or(WaitReason::Turn),
            PauseState::PausedNew | PauseState::PausedAll => WaitReason::Pause,
        }
    }

    /// The first request of the queue that waits for the server, if there is one.
    pub fn head_of_queue(&self) -> Option<HeadOfQueue> {
        if self.num_waiting() == self.deferred.by_reason()[WaitReason::SessionInput as usize] {
            return None;
        }
        let waits = |index| self.wait_reason(index) != WaitReason::SessionInput;
        let find = |queue: &RequestQueue| queue.find(&self.slots, waits);
        let index = find(&self.kv_holding_waiting).or_else(|| find(&self.waiting))?;
        Some(HeadOfQueue { index, reason: self.wait_reason(index) })
    }

    pub fn block_holders(&self) -> BlockHolders {
        let pool = self.kv_cache.pool();
        let mut holders = BlockHolders {
            num_blocks: pool.num_blocks() - 1,
            num_free: pool.num_free(),
            ..BlockHolders::default()
        };
        let mut is_counted = vec![false; pool.num_blocks() as usize];
        let mut count = |requests: &[RequestIndex]| {
            let groups = requests.iter().flat_map(|&index| &self.request(index).groups);
            let blocks = groups.flat_map(|blocks| &blocks.table).filter(|id| !id.is_null());
            let new = blocks.filter(|id| !std::mem::replace(&mut is_counted[id.0 as usize], true));
            new.count() as u32
        };
        let waiting = self.kv_holding_waiting.in_order(&self.slots).into_iter();
        let (sessions, others): (Vec<_>, Vec<_>) =
            waiting.partition(|&it| self.request(it).status == RequestStatus::WaitingForInput);
        holders.num_running = count(&self.running);
        holders.num_sessions = count(&sessions);
        holders.num_waiting = count(&others);
        let num_of_unfinished = holders.num_running + holders.num_sessions + holders.num_waiting;
        holders.num_ended = holders.num_blocks - holders.num_free - num_of_unfinished;
        holders
    }

    /// How many blocks the last request lacked that didn't get them, if there was one.
    pub fn block_shortfall(&self) -> Option<BlockShortfall> {
        self.kv_cache.shortfall()
    }

    /// Counts the calls of `schedule()`.
    pub fn num_decisions(&self) -> u64 {
        self.current_step
    }

    pub fn loras_of_step(&self) -> &[i64] {
        &self.step.loras
    }

    /// Limits how long a request may wait to be scheduled for the first time: see
    /// [`Self::take_expired`].
    pub fn set_queue_deadline(&mut self, index: RequestIndex, deadline: f64) {
        self.slots[index].queue_deadline = deadline;
        self.queue_deadlines.insert((deadline.to_bits(), index));
    }

    /// Forgets how long a request may wait: it has been scheduled, or is gone.
    pub(super) fn drop_queue_deadline(&mut self, index: RequestIndex) {
        let deadline = std::mem::replace(&mut self.slots[index].queue_deadline, f64::INFINITY);
        if deadline < f64::INFINITY {
            self.queue_deadlines.remove(&(deadline.to_bits(), index));
        }
    }

    /// When [`Self::take_expired`] may have something to tell; infinity for never.
    pub fn next_queue_deadline(&self) -> f64 {
        self.queue_deadlines.first().map_or(f64::INFINITY, |&(bits, _)| f64::from_bits(bits))
    }

    /// Requests that have never been scheduled, and whose time for that is up: each is told once.
    /// They are still there: it is for the caller to end them.
    pub fn take_expired(&mut self, now: f64) -> Vec<RequestIndex> {
        let mut expired = Vec::new();
        while let Some(&(bits, index)) = self.queue_deadlines.first() {
            if f64::from_bits(bits) > now {
                break;
            }
            self.queue_deadlines.pop_first();
            expired.push(index);
        }
        expired
    }
}

/// What a request waits for from the moment it is queued.
pub(super) fn reason_of_status(status: RequestStatus) -> Option<WaitReason> {
    match status {
        RequestStatus::WaitingForGrammar => Some(WaitReason::Grammar),
        RequestStatus::WaitingForInput => Some(WaitReason::SessionInput),
        RequestStatus::WaitingForRemoteKvs => Some(WaitReason::KvLoad),
        _ => None,
    }
}
