//! Every memory ordering that the protocol rests on, with the one that it pairs with.
//!
//! They stand in one list so that the loom models can weaken each in turn and see that a model
//! fails: an ordering whose weakening no model notices is either not needed or not tested.

use std::sync::atomic::Ordering;

macro_rules! orderings {
    ($($(#[$doc:meta])* $name:ident: $ordering:ident;)*) => {
        pub const ALL: &[&str] = &[$(stringify!($name)),*];

        $(
            $(#[$doc])*
            #[cfg(not(feature = "loom"))]
            #[inline]
            pub const fn $name() -> Ordering {
                Ordering::$ordering
            }

            $(#[$doc])*
            #[cfg(feature = "loom")]
            pub fn $name() -> Ordering {
                weakened(stringify!($name), Ordering::$ordering)
            }
        )*
    };
}

orderings! {
    /// Store of the tail: the bytes before it are written. Pairs with `observe_tail`.
    publish_tail: Release;
    /// Load of the tail: the bytes before it may be read. Pairs with `publish_tail`.
    observe_tail: Acquire;
    /// Store of the head: the bytes before it have been copied out. Pairs with `observe_head`.
    release_head: Release;
    /// Load of the head: the bytes before it may be overwritten. Pairs with `release_head`.
    observe_head: Acquire;
    /// Store of the closed mark: all was published before it. Pairs with `observe_close`.
    publish_close: Release;
    /// Load of the closed mark: a tail read after it is the last. Pairs with `publish_close`.
    observe_close: Acquire;
    /// Fence between publishing and looking whether the reader sleeps. Pairs with `before_sleep`.
    before_ringing: SeqCst;
    /// Fence between saying "I sleep" and looking once more. Pairs with `before_ringing`.
    before_sleep: SeqCst;
    /// Fence between freeing space and looking whether the writer waits for it. Pairs with
    /// `before_waiting`.
    before_space_check: SeqCst;
    /// Fence between saying "I wait for space" and looking once more. Pairs with
    /// `before_space_check`.
    before_waiting: SeqCst;
    /// Count of a sample in a bucket: its time is in the sum. Pairs with `observe_sample`.
    count_sample: Release;
    /// Fence between loading the buckets and loading the sum: that has the times of all that they
    /// count. Pairs with `count_sample`.
    observe_sample: Acquire;
}

/// A fence, unless it has been weakened to none.
#[inline]
pub fn fence(ordering: Ordering) {
    if cfg!(not(feature = "loom")) || ordering != Ordering::Relaxed {
        crate::sync::fence(ordering);
    }
}

#[cfg(feature = "loom")]
static WEAKENED: std::sync::Mutex<Option<&'static str>> = std::sync::Mutex::new(None);

/// Makes one ordering relaxed, or drops it if it is a fence; `None` restores all.
#[cfg(feature = "loom")]
pub fn weaken(name: Option<&'static str>) {
    *WEAKENED.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = name;
}

#[cfg(feature = "loom")]
fn weakened(name: &str, ordering: Ordering) -> Ordering {
    let weakened = *WEAKENED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if weakened == Some(name) { Ordering::Relaxed } else { ordering }
}
