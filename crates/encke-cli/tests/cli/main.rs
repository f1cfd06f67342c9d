//! The `encke` command from outside: files in, files out, exit codes, output.
//!
//! These tests run the program and call nothing of the library. They are one test program, because
//! linking takes longer than running them.

mod attend;
mod attend_pairs;
mod bad_input;
mod bench;
mod billion;
mod chromium;
mod command;
mod console;
mod demo;
mod device;
mod files;
mod foreign;
mod golden;
mod key_lengths;
mod option_pairs;
mod outputs;
mod pages;
mod plan;
mod profile;
mod report;
mod signals;
mod simulate;
mod streamed;
mod tune;
mod verify;
