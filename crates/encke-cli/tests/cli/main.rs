//! The `encke` command from outside: files in, files out, exit codes, output.
//!
//! These tests run the program and call nothing of the library. They are one test program, because
//! linking takes longer than running them.

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
