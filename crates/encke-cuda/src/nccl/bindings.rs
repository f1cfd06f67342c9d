//! The functions of NCCL that hops need, found at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use libloading::os::unix::Library;

use crate::error::{Error, Result};
use crate::library::{self, NCCL};

/// What the first rank makes and every other one is given: where they meet.
pub type UniqueId = [u8; 128];

/// NCCL's own memory of a communicator.
pub(super) type Handle = *mut c_void;
/// `ncclResult_t`.
pub(super) type Code = c_int;

pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;
/// `ncclUint8`: parcels are bytes to NCCL.
pub(super) const BYTES: c_int = 1;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawId {
    pub bytes: UniqueId,
}

/// `ncclConfig_t` as of 2.14, the first that has one. Newer libraries read the version and take
/// their defaults for what came later.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    undefined: c_int,
}

impl Config {
    /// Calls that return before they are done.
    pub fn nonblocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21400,
            blocking: 0,
            undefined: c_int::MIN,
        }
    }
}

type OnHandle = unsafe extern "C" fn(Handle) -> Code;
type Group = unsafe extern "C" fn() -> Code;

/// A loaded NCCL.
pub struct Nccl {
    version: c_int,
    get_unique_id: unsafe extern "C" fn(*mut RawId) -> Code,
    pub(super) init: unsafe extern "C" fn(*mut Handle, c_int, RawId, c_int, *mut Config) -> Code,
    pub(super) finalize: OnHandle,
    pub(super) destroy: OnHandle,
    pub(super) abort: OnHandle,
    pub(super) async_error: unsafe extern "C" fn(Handle, *mut Code) -> Code,
    pub(super) group_start: Group,
    pub(super) group_end: Group,
    pub(super) send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> Code,
    pub(super) receive:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    // The functions above are in it.
    _library: Library,
}

impl Nccl {
    /// Finds and loads it.
    pub fn load() -> Result<Arc<Nccl>> {
        let (library, _) = library::find(&NCCL)?;
        let get_version: unsafe extern "C" fn(*mut c_int) -> Code =
            function(&library, "ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: one place for one number, as documented.
        unsafe { get_version(&mut version) };
        Ok(Arc::new(Nccl {
            version,
            get_unique_id: function(&library, "ncclGetUniqueId")?,
            init: function(&library, "ncclCommInitRankConfig")?,
            finalize: function(&library, "ncclCommFinalize")?,
            destroy: function(&library, "ncclCommDestroy")?,
            abort: function(&library, "ncclCommAbort")?,
            async_error: function(&library, "ncclCommGetAsyncError")?,
            group_start: function(&library, "ncclGroupStart")?,
            group_end: function(&library, "ncclGroupEnd")?,
            send: function(&library, "ncclSend")?,
            receive: function(&library, "ncclRecv")?,
            error_string: function(&library, "ncclGetErrorString")?,
            last_error: function(&library, "ncclGetLastError")?,
            _library: library,
        }))
    }

    /// Its version, for messages.
    pub fn version(&self) -> String {
        let [major, minor, patch] = [
            self.version / 10_000,
            self.version / 100 % 100,
            self.version % 100,
        ];
        format!("{major}.{minor}.{patch}")
    }

    /// A new meeting place. One rank asks for it; the caller brings it to the others.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = RawId { bytes: [0; 128] };
        // SAFETY: a place of the documented size.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        match code {
            SUCCESS => Ok(id.bytes),
            code => Err(self.error("making a meeting place", code, std::ptr::null_mut())),
        }
    }

    /// What NCCL says of a number, and of the last thing that went wrong.
    pub(super) fn error(&self, what: &str, code: Code, handle: Handle) -> Error {
        let text = |said: *const c_char| match said.is_null() {
            true => String::new(),
            // SAFETY: NCCL returns strings of its own that end with a zero.
            false => unsafe { CStr::from_ptr(said) }
                .to_string_lossy()
                .into_owned(),
        };
        // SAFETY: any number is answered; the handle is null or alive.
        let (said, last) = unsafe {
            (
                text((self.error_string)(code)),
                text((self.last_error)(handle)),
            )
        };
        Error::Nccl {
            what: what.into(),
            reason: match last.trim().is_empty() {
                true => said,
                false => format!("{said} ({})", last.trim()),
            },
        }
    }
}

fn function<T: Copy>(library: &Library, name: &str) -> Result<T> {
    // SAFETY: every caller names the documented type of the function it asks for.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    symbol.map(|symbol| *symbol).map_err(|_| Error::Function {
        library: NCCL.library,
        function: name.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_lies_as_nccl_reads_it() {
        use std::mem::offset_of;
        assert_eq!(size_of::<RawId>(), 128);
        let places = [
            offset_of!(Config, size),
            offset_of!(Config, magic),
            offset_of!(Config, version),
            offset_of!(Config, blocking),
        ];
        assert_eq!(places, [0, 8, 12, 16]);
    }
}
