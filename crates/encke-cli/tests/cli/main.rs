//! The `encke` command from outside: files in, files out, exit codes, lines.
//!
//! Nothing of the library is called here: what a user cannot see is tested elsewhere. All tests
//! are one program, because linking is slower than running them.

mod attend;
mod bad_input;
mod bench;
mod billion;
mod chromium;
mod command;
mod console;
mod demo;
mod device;
mod files;
mod golden;
mod pages;
mod plan;
mod profile;
mod report;
mod simulate;
mod streamed;
mod tune;
mod verify;
