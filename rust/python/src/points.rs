//! Named points at which tests let the extension panic: where each function that Python calls
//! begins, and where it has done its work.

/// Where in a function a point is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Nothing has happened yet.
    Beginning,
    /// All has happened, and only the caller doesn't know yet.
    End,
}

#[cfg(feature = "test-points")]
mod armed {
    use std::sync::{Mutex, PoisonError};

    use pyo3::prelude::*;

    use super::Moment;

    struct Armed {
        entry: String,
        moment: Moment,
        /// Calls that are let through before it panics.
        num_spared: u32,
    }

    static ARMED: Mutex<Option<Armed>> = Mutex::new(None);

    /// Lets each call of `entry` panic after the first `num_spared`, from now on.
    #[pyfunction]
    #[pyo3(signature = (entry, *, at_end = false, num_spared = 0))]
    fn arm_panic(entry: String, at_end: bool, num_spared: u32) {
        let moment = if at_end { Moment::End } else { Moment::Beginning };
        let armed = Armed { entry, moment, num_spared };
        *ARMED.lock().unwrap_or_else(PoisonError::into_inner) = Some(armed);
    }

    /// Lets nothing panic any more.
    #[pyfunction]
    fn disarm_panic() {
        *ARMED.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add_function(wrap_pyfunction!(arm_panic, module)?)?;
        module.add_function(wrap_pyfunction!(disarm_panic, module)?)
    }

    /// Panics if a test wants that here.
    pub(crate) fn reach(entry: &str, moment: Moment) {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        let here = armed.as_mut().filter(|it| it.entry == entry && it.moment == moment);
        let Some(here) = here else { return };
        if here.num_spared > 0 {
            here.num_spared -= 1;
            return;
        }
        drop(armed);
        panic!("a test wants a panic at the {moment:?} of {entry}");
    }
}

#[cfg(feature = "test-points")]
pub(crate) use armed::{add_to, reach};

/// Marks a point; does nothing.
#[cfg(not(feature = "test-points"))]
#[inline]
pub(crate) const fn reach(_entry: &str, _moment: Moment) {}
