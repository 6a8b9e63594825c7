//! What requests wait for, and for how long at most. Looking changes nothing that a decision depends
//! on.
//!
//! A request that a step skipped has a reason of its own. A step looks at none behind the one at which
//! it stops: they wait for the same as that one.

use super::{PauseState, Scheduler};
use crate::ids::{BlockId, RequestIndex};
use crate::kv_cache_manager::BlockShortfall;
use crate::request::{Request, RequestStatus};
use crate::wait_reason::{WaitCounts, WaitReason};

/// The first request of the queue that waits for the server, and not for its client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadOfQueue {
    /// Which one.
    pub index: RequestIndex,
    /// What it waits for.
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

    /// How many requests wait for what.
    #[must_use]
    pub fn wait_counts(&self) -> WaitCounts {
        let mut counts = self.deferred;
        let num_others = self.num_waiting() - counts.total();
        counts.add_many(self.reason_of_others(), num_others);
        counts
    }

    /// What a request waits for.
    #[must_use]
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
    #[must_use]
    pub fn head_of_queue(&self) -> Option<HeadOfQueue> {
        if self.num_waiting() == self.deferred.by_reason()[WaitReason::SessionInput as usize] {
            return None;
        }
        let waiting = self.waiting().into_iter();
        let mut heads = waiting.map(|index| HeadOfQueue { index, reason: self.wait_reason(index) });
        heads.find(|head| head.reason != WaitReason::SessionInput)
    }

    /// Who holds blocks.
    #[must_use]
    pub fn block_holders(&self) -> BlockHolders {
        let pool = self.kv_cache.pool();
        let mut holders = BlockHolders {
            num_blocks: pool.num_blocks() - 1,
            num_free: pool.num_free(),
            ..BlockHolders::default()
        };
        let mut is_counted = vec![false; pool.num_blocks() as usize];
        let mut count = |of: &dyn Fn(&Request) -> bool| {
            let requests = self.slots.iter().filter(|request| of(request));
            let groups = requests.flat_map(|request| &request.groups);
            let blocks = groups.flat_map(|blocks| &blocks.table).filter(|id| !id.is_null());
            let new = blocks.filter(|id| !std::mem::replace(&mut is_counted[id.0 as usize], true));
            new.count() as u32
        };
        let is_session = |request: &Request| request.status == RequestStatus::WaitingForInput;
        holders.num_running = count(&|request| request.status == RequestStatus::Running);
        holders.num_sessions = count(&is_session);
        holders.num_waiting = count(&|request| !request.status.is_finished());
        holders.num_ended = count(&|_| true);
        let deferred = self.kv_transfer.deferred_frees.iter().flat_map(|(_, blocks)| blocks);
        let is_held = |id: &&BlockId| !id.is_null() && !is_counted[id.0 as usize];
        holders.num_ended += deferred.filter(is_held).count() as u32;
        holders
    }

    /// How many blocks the last request lacked that didn't get them, if there was one.
    #[must_use]
    pub fn block_shortfall(&self) -> Option<BlockShortfall> {
        self.kv_cache.shortfall()
    }

    /// Counts the calls of `schedule()`.
    #[must_use]
    pub fn num_decisions(&self) -> u64 {
        self.current_step
    }

    /// Adapters of the last step.
    #[must_use]
    pub fn loras_of_step(&self) -> &[i64] {
        &self.step.loras
    }

    /// Limits how long a request may wait to be scheduled for the first time: see
    /// [`Self::take_expired`].
    pub fn set_queue_deadline(&mut self, index: RequestIndex, deadline: f64) {
        self.slots[index].queue_deadline = deadline;
        self.next_queue_deadline = self.next_queue_deadline.min(deadline);
    }

    /// When [`Self::take_expired`] may have something to tell; infinity for never.
    #[must_use]
    pub fn next_queue_deadline(&self) -> f64 {
        self.next_queue_deadline
    }

    /// Requests that have never been scheduled, and whose time for that is up. They are still
    /// there: it is for the caller to end them.
    pub fn take_expired(&mut self, now: f64) -> Vec<RequestIndex> {
        if now < self.next_queue_deadline {
            return Vec::new();
        }
        let waits = |request: &&Request| request.last_step == 0 && !request.status.is_finished();
        let (expired, others): (Vec<&Request>, Vec<&Request>) =
            self.slots.iter().filter(waits).partition(|request| request.queue_deadline <= now);
        let expired = expired.into_iter().map(Request::index).collect();
        let deadlines = others.into_iter().map(|request| request.queue_deadline);
        self.next_queue_deadline = deadlines.fold(f64::INFINITY, f64::min);
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
