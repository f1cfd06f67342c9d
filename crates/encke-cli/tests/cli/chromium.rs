//! Opens pages in Chromium through its DevTools protocol.
//!
//! Not a general client: one page at a time, every call waits for its answer, and events are stored
//! until a test reads them. The decision here: the protocol is JSON over a WebSocket, so a
//! WebSocket crate is enough; crates that wrap the protocol have seven times as many dependencies
//! and lag behind the browser.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tungstenite::stream::MaybeTlsStream;
use tungstenite::{Message, WebSocket};

/// Names of browsers with this protocol.
const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// A running browser; dropping it ends the browser.
pub struct Chromium {
    process: Child,
    socket: WebSocket<MaybeTlsStream<TcpStream>>,
    session: String,
    calls: u64,
    events: Vec<Value>,
    _profile: TempDir,
}

/// The browser that `CHROME` names, or the first one in PATH.
pub fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("CHROME").filter(|named| !named.is_empty()) {
        return Some(PathBuf::from(named));
    }
    let folders = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&folders).collect();
    let paths = NAMES
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    paths.into_iter().find(|path| path.is_file())
}

/// Starts a browser. Without one, prints that the test is skipped, directly to standard error
/// because the test harness hides the output of passing tests, or fails if ENCKE_REQUIRE_CHROMIUM
/// is set.
pub fn start_or_skip() -> Option<Chromium> {
    let Some(program) = find() else {
        let message = "no chromium in PATH and no CHROME: the page was NOT opened in a browser";
        assert!(
            std::env::var_os("ENCKE_REQUIRE_CHROMIUM").is_none(),
            "{message}; ENCKE_REQUIRE_CHROMIUM requires it (apt-get install chromium)"
        );
        let line = format!("\nSKIPPED: {message} (apt-get install chromium)\n");
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
        return None;
    };
    Some(Chromium::start(&program))
}

impl Chromium {
    fn start(program: &Path) -> Chromium {
        let profile = tempfile::tempdir().unwrap();
        let mut process = Command::new(program)
            .args(["--headless", "--remote-debugging-port=0", "--disable-gpu"])
            // Tests may run as root, where there is no sandbox, and in small containers.
            .args(["--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-extensions", "--disable-background-networking"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()));
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        let address = address(&mut stderr);
        // The browser keeps writing, and blocks when the pipe is full: a thread drains it.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        let (socket, _) = tungstenite::connect(address.as_str()).unwrap();
        if let MaybeTlsStream::Plain(stream) = socket.get_ref() {
            let timeout = Some(Duration::from_secs(60));
            stream.set_read_timeout(timeout).unwrap();
        }
        let mut browser = Chromium {
            process,
            socket,
            session: String::new(),
            calls: 0,
            events: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", target);
        browser.session = session["sessionId"].as_str().unwrap().to_string();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Calls a method and waits for its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.socket
            .send(Message::text(message.to_string()))
            .unwrap();
        loop {
            let answer = self.read();
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    fn read(&mut self) -> Value {
        loop {
            if let Message::Text(text) = self.socket.read().unwrap() {
                return serde_json::from_str(&text).unwrap();
            }
        }
    }

    /// Opens a file on a screen of this width and colour scheme, and drops earlier events.
    pub fn open(&mut self, file: &Path, width: u32, scheme: &str) {
        let scheme = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": scheme}));
        let screen =
            json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", screen);
        self.events.clear();
        let address = format!("file://{}", file.display());
        let opened = self.call("Page.navigate", json!({"url": address}));
        assert!(opened["errorText"].is_null(), "{opened}");
        while !self
            .events
            .iter()
            .any(|event| event["method"] == "Page.loadEventFired")
        {
            let event = self.read();
            self.events.push(event);
        }
    }

    /// The value of an expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let call = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", call);
        assert!(result["exceptionDetails"].is_null(), "{result}");
        result["result"]["value"].clone()
    }

    /// Moves the pointer.
    pub fn point_at(&mut self, x: f64, y: f64) {
        let event = json!({"type": "mouseMoved", "x": x, "y": y});
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Events of one of these kinds since the page was opened.
    pub fn events(&self, methods: &[&str]) -> Vec<&Value> {
        let of = |event: &&Value| methods.iter().any(|method| event["method"] == *method);
        self.events.iter().filter(of).collect()
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        // A graceful close also ends its child processes.
        let close = json!({"id": 0, "method": "Browser.close"});
        let sent = self.socket.send(Message::text(close.to_string()));
        if sent.is_err() {
            let _ = self.process.kill();
        }
        let _ = self.process.wait();
    }
}

/// The address from the line in which the browser prints it.
fn address(stderr: &mut impl BufRead) -> String {
    let mut all = String::new();
    loop {
        let mut line = String::new();
        let read = stderr.read_line(&mut line).unwrap();
        assert!(read > 0, "the browser ended before it listened: {all}");
        if let Some(address) = line.trim().strip_prefix("DevTools listening on ") {
            return address.to_string();
        }
        all += &line;
    }
}
