//! Who is at the other end of a Unix socket.

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd};

/// A peer as the kernel knows it from the moment it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// 0 if the process is of a PID namespace that this one doesn't see.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

/// The credentials of the process that a connected socket leads to.
///
/// rustix has this as well, but no value for the pid of a process in another PID namespace.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> std::io::Result<Credentials> {
    let mut credentials = MaybeUninit::<libc::ucred>::uninit();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes to the buffer.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 || len as usize != size_of::<libc::ucred>() {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel has written all of it, and integers have no invalid values.
    let credentials = unsafe { credentials.assume_init() };
    Ok(Credentials { pid: credentials.pid, uid: credentials.uid })
}
