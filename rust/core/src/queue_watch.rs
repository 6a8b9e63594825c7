//! Notices that the head of the queue doesn't move.
//!
//! Whoever has a clock looks now and then; a look reads the scheduler and changes nothing in it.

use crate::ids::RequestIndex;
use crate::scheduler::{HeadOfQueue, PauseState, Scheduler};
use crate::wait_reason::WaitReason;

/// How long nothing is said of the same reason once it was, in seconds: under overload each head
/// waits for long.
const QUIET_S: f64 = 60.0;

/// Tells when a request has been the head of the queue for too long, and when it moves.
#[derive(Clone, Debug)]
pub struct QueueWatch {
    after_s: f64,
    head: Option<Watched>,
    /// The head was told of.
    is_told: bool,
    last_told: Option<(WaitReason, f64)>,
}

#[derive(Clone, Debug)]
struct Watched {
    index: RequestIndex,
    id: Box<str>,
    /// The last step that it was part of: it may run and come back.
    last_step: u64,
    since: f64,
    /// Decisions that had been made by then.
    num_decisions: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// A request has been the head of the queue for too long.
    Stuck { head: HeadOfQueue, waits_s: f64 },
    /// One that was told of has moved, or is gone.
    Moves {
        id: Box<str>,
        /// How long it was the head, in seconds.
        waited_s: f64,
    },
}

impl QueueWatch {
    /// A watch that tells of requests that are the head for `after_s` seconds.
    pub fn new(after_s: f64) -> Self {
        Self { after_s, head: None, is_told: false, last_told: None }
    }

    /// Looks at the queue; `now` is in seconds of the caller's clock.
    pub fn look(&mut self, scheduler: &Scheduler, now: f64) -> Option<Finding> {
        let head = scheduler.head_of_queue();
        if !self.is_still(scheduler, head) {
            let before =
                std::mem::replace(&mut self.head, head.map(|it| watch(scheduler, it, now)));
            let was_told = std::mem::take(&mut self.is_told);
            return before
                .filter(|_| was_told)
                .map(|before| Finding::Moves { waited_s: now - before.since, id: before.id });
        }
        let (Some(watched), Some(mut head)) = (&self.head, head) else { return None };
        let waits_s = now - watched.since;
        if self.is_told || waits_s < self.after_s {
            return None;
        }
        let is_decided = scheduler.num_decisions() > watched.num_decisions;
        if !is_decided && scheduler.pause_state() == PauseState::Unpaused {
            head.reason = WaitReason::Turn;
        }
        let is_old = |&(reason, at): &(WaitReason, f64)| {
            reason == head.reason && now - at < QUIET_S.max(self.after_s)
        };
        if self.last_told.as_ref().is_some_and(is_old) {
            return None;
        }
        self.is_told = true;
        self.last_told = Some((head.reason, now));
        Some(Finding::Stuck { head, waits_s })
    }

    /// Whether the head is the one that was seen last, and hasn't been scheduled since.
    fn is_still(&self, scheduler: &Scheduler, head: Option<HeadOfQueue>) -> bool {
        match (&self.head, head) {
            (None, None) => true,
            (Some(watched), Some(head)) => {
                let request = scheduler.request(head.index);
                watched.index == head.index
                    && *watched.id == *request.id()
                    && watched.last_step == request.last_step
            }
            _ => false,
        }
    }
}

fn watch(scheduler: &Scheduler, head: HeadOfQueue, now: f64) -> Watched {
    let request = scheduler.request(head.index);
    Watched {
        index: head.index,
        id: request.id().into(),
        last_step: request.last_step,
        since: now,
        num_decisions: scheduler.num_decisions(),
    }
}
