//! What pacing has promised a request about its first token. No decision of the scheduler rests on
//! it; it is here because it comes and goes with its request.

/// Why a prompt came later than promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateBy {
    /// It lost its blocks to others.
    Preemption,
    /// It could not come in: for want of blocks, of a place, of an adapter's.
    Waiting,
    /// Steps took longer than expected, or too many had to be in time.
    Steps,
}

/// When a prompt is to be through. Times are those of pacing, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Promise {
    /// When it was first seen.
    pub(crate) arrived_at: f64,
    /// From when on it could be computed.
    pub(crate) since: f64,
    /// So much later it would be through without pacing, at the speed of that time.
    pub(crate) virtual_s: f64,
    /// What it lacked, and each token of that times what it attends to.
    pub(crate) num_tokens: f64,
    pub(crate) attention: f64,
    /// What these take by themselves, at the speed of that time.
    pub(crate) work_s: f64,
    /// It fits into a step within the stall.
    pub(crate) is_ordinary: bool,
    /// It can't be kept as it was given.
    pub(crate) is_void: bool,
    /// What would be the reason if it came too late.
    pub(crate) late_by: LateBy,
}

impl Promise {
    /// It can't be kept, for this reason.
    pub(crate) fn void(&mut self, by: LateBy) {
        self.is_void = true;
        self.late_by = by;
    }
}
