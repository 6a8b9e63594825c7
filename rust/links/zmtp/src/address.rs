//! ZMQ's addresses, as far as they name something on this host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};

/// A listener on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `ipc://PATH`
    Unix(PathBuf),
    /// `tcp://HOST:PORT`, where the host is the loopback interface
    Loopback(SocketAddr),
}

impl Address {
    /// Reads one of ZMQ's addresses. None if it may be on another host, or is of another kind.
    pub fn local(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("ipc://") {
            // libzmq gives these a meaning of their own.
            let is_plain = !path.is_empty() && path != "*" && !path.starts_with('@');
            return is_plain.then(|| Self::Unix(path.into()));
        }
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
        let host: IpAddr = match host {
            "localhost" => Ipv4Addr::LOCALHOST.into(),
            host => host.parse().ok()?,
        };
        let port = port.parse().ok().filter(|port| *port != 0)?;
        host.is_loopback().then_some(Self::Loopback((host, port).into()))
    }

    /// Begins to connect; the socket can be written to once that has succeeded.
    pub(crate) fn connect(&self) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, connected) = match self {
            Self::Unix(path) => {
                let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                let connected = connect(&socket, &SocketAddrUnix::new(path)?);
                (socket, connected)
            }
            Self::Loopback(address) => {
                let family = match address {
                    SocketAddr::V4(_) => AddressFamily::INET,
                    SocketAddr::V6(_) => AddressFamily::INET6,
                };
                let socket = socket_with(family, SocketType::STREAM, flags, None)?;
                sockopt::set_tcp_nodelay(&socket, true)?;
                let connected = connect(&socket, address);
                (socket, connected)
            }
        };
        // A step's outputs should fit: what doesn't is sent by another thread. The system has a
        // limit of its own.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES);
        match connected {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error),
        }
    }
}

const SEND_BUFFER_BYTES: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_on_this_host_is_local() {
        let loopback = |text: &str| Some(Address::Loopback(text.parse().unwrap()));
        assert_eq!(Address::local("ipc:///tmp/a"), Some(Address::Unix("/tmp/a".into())));
        assert_eq!(Address::local("tcp://127.0.0.1:5555"), loopback("127.0.0.1:5555"));
        assert_eq!(Address::local("tcp://localhost:5555"), loopback("127.0.0.1:5555"));
        assert_eq!(Address::local("tcp://[::1]:5555"), loopback("[::1]:5555"));
        for other in [
            "tcp://10.0.0.1:5555",
            "tcp://example.org:5555",
            "tcp://127.0.0.1:*",
            "tcp://127.0.0.1:0",
            "ipc://@abstract",
            "ipc://*",
            "ipc://",
            "inproc://a",
            "",
        ] {
            assert_eq!(Address::local(other), None, "{other}");
        }
    }
}
