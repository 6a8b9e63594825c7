//! Named points of the protocol, where the fault tests kill or stop a process.

/// All points, in the order in which a message passes them.
pub const ALL: &[&str] = &[
    "hello-sent",
    "welcome-sent",
    "confirmed",
    "attached",
    "written",
    "published",
    "ringing",
    "rung",
    "half-written",
    "read",
    "released",
    "asleep",
    "waiting-for-space",
    "closing",
];

/// What to do on reaching a point.
#[cfg(feature = "test-points")]
pub static HOOK: std::sync::OnceLock<fn(&str)> = std::sync::OnceLock::new();

/// Marks a point; does nothing unless a fault test listens.
#[cfg(feature = "test-points")]
pub(crate) fn reach(point: &str) {
    debug_assert!(ALL.contains(&point), "{point} is not listed");
    if let Some(hook) = HOOK.get() {
        hook(point);
    }
}

/// Marks a point; does nothing.
#[cfg(not(feature = "test-points"))]
#[inline]
pub(crate) const fn reach(_point: &str) {}
