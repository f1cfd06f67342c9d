//! The functions of NCCL that messages need, loaded at run time.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use libloading::os::unix::Library;

use crate::error::{Error, Result};
use crate::library::{self, NCCL};

/// `ncclUniqueId`: one rank creates it and all ranks join under it.
pub type UniqueId = [u8; 128];

/// `ncclComm_t`.
pub(super) type CommHandle = *mut c_void;
/// `ncclResult_t`.
pub(super) type NcclCode = c_int;

pub(super) const SUCCESS: NcclCode = 0;
pub(super) const IN_PROGRESS: NcclCode = 7;
/// `ncclUint8`: parcels are sent as bytes.
pub(super) const BYTES: c_int = 1;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct NcclUniqueId {
    pub bytes: UniqueId,
}

/// `ncclConfig_t` of NCCL 2.14, the first version with one. Newer libraries read `version` and use
/// defaults for later fields.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    undefined: c_int,
}

impl NcclConfig {
    /// Non-blocking calls: they return before they are complete.
    pub fn nonblocking() -> NcclConfig {
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: 21400,
            blocking: 0,
            undefined: c_int::MIN,
        }
    }
}

type CommFn = unsafe extern "C" fn(CommHandle) -> NcclCode;
type GroupFn = unsafe extern "C" fn() -> NcclCode;

/// A loaded NCCL.
pub struct Nccl {
    version: c_int,
    get_unique_id: unsafe extern "C" fn(*mut NcclUniqueId) -> NcclCode,
    pub(super) init: unsafe extern "C" fn(
        *mut CommHandle,
        c_int,
        NcclUniqueId,
        c_int,
        *mut NcclConfig,
    ) -> NcclCode,
    pub(super) finalize: CommFn,
    pub(super) destroy: CommFn,
    pub(super) abort: CommFn,
    pub(super) async_error: unsafe extern "C" fn(CommHandle, *mut NcclCode) -> NcclCode,
    pub(super) group_start: GroupFn,
    pub(super) group_end: GroupFn,
    pub(super) send: unsafe extern "C" fn(
        *const c_void,
        usize,
        c_int,
        c_int,
        CommHandle,
        *mut c_void,
    ) -> NcclCode,
    pub(super) receive:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, CommHandle, *mut c_void) -> NcclCode,
    error_string: unsafe extern "C" fn(NcclCode) -> *const c_char,
    last_error: unsafe extern "C" fn(CommHandle) -> *const c_char,
    // Keeps the functions above loaded.
    _library: Library,
}

impl Nccl {
    /// Finds and loads it.
    pub fn load() -> Result<Arc<Nccl>> {
        let (library, _) = library::find(&NCCL)?;
        fn get<T: Copy>(library: &Library, name: &str) -> Result<T> {
            library::function(library, &NCCL, name)
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> NcclCode =
            get(&library, "ncclGetVersion")?;
        let mut version = 0;
        // SAFETY: a pointer to one int, as documented.
        unsafe { get_version(&mut version) };
        Ok(Arc::new(Nccl {
            version,
            get_unique_id: get(&library, "ncclGetUniqueId")?,
            init: get(&library, "ncclCommInitRankConfig")?,
            finalize: get(&library, "ncclCommFinalize")?,
            destroy: get(&library, "ncclCommDestroy")?,
            abort: get(&library, "ncclCommAbort")?,
            async_error: get(&library, "ncclCommGetAsyncError")?,
            group_start: get(&library, "ncclGroupStart")?,
            group_end: get(&library, "ncclGroupEnd")?,
            send: get(&library, "ncclSend")?,
            receive: get(&library, "ncclRecv")?,
            error_string: get(&library, "ncclGetErrorString")?,
            last_error: get(&library, "ncclGetLastError")?,
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

    /// A new unique id. One rank creates it; the caller distributes it to the others.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = NcclUniqueId { bytes: [0; 128] };
        // SAFETY: a buffer of the documented size.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        match code {
            SUCCESS => Ok(id.bytes),
            code => Err(self.error("creating a unique id", code, std::ptr::null_mut())),
        }
    }

    /// An error with NCCL's text for a result code and its last error message.
    pub(super) fn error(&self, what: &str, code: NcclCode, handle: CommHandle) -> Error {
        let owned = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL returns zero-terminated strings that it owns.
            false => unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned(),
        };
        // SAFETY: NCCL has a text for any code; the handle is null or alive.
        let (text, last) = unsafe {
            (
                owned((self.error_string)(code)),
                owned((self.last_error)(handle)),
            )
        };
        Error::Nccl {
            what: what.into(),
            reason: match last.trim().is_empty() {
                true => text,
                false => format!("{text} ({})", last.trim()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_nccls_layout() {
        use std::mem::offset_of;
        assert_eq!(size_of::<NcclUniqueId>(), 128);
        let offsets = [
            offset_of!(NcclConfig, size),
            offset_of!(NcclConfig, magic),
            offset_of!(NcclConfig, version),
            offset_of!(NcclConfig, blocking),
        ];
        assert_eq!(offsets, [0, 8, 12, 16]);
    }
}
