//! Named points, where the fault tests kill, stop or break a process.

/// The points of the protocol, in the order in which a message passes them.
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

/// A point of the watcher thread, in each of its rounds: no message passes it.
pub const WATCHING: &str = "watching";

/// A point of the watcher thread, in each round that leaves an engine's listener alone.
pub const SHUT: &str = "shut";

/// What to do on reaching a point.
#[cfg(feature = "test-points")]
pub static LISTENER: std::sync::OnceLock<fn(&str)> = std::sync::OnceLock::new();

/// Marks a point; does nothing unless a fault test listens.
#[cfg(feature = "test-points")]
pub(crate) fn reach(point: &str) {
    debug_assert!(
        ALL.contains(&point) || [WATCHING, SHUT].contains(&point),
        "{point} is not listed"
    );
    if let Some(listener) = LISTENER.get() {
        listener(point);
    }
}

/// Marks a point; does nothing.
#[cfg(not(feature = "test-points"))]
#[inline]
pub(crate) const fn reach(_point: &str) {}
