//! The measured tools on the official Rust SDK.
//!
//!     bench stdio | http [--reply json|sse]
//!     bench memory COUNT UNDER_WAY
//!
//! Over a network the first line of output is the URL. Nagle's algorithm is off, which axum leaves on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use axum::serve::ListenerExt;
use rmcp::{
    ErrorData, Peer, RoleClient, RoleServer, ServerHandler, ServiceExt,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    model::*,
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
    },
};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Said {
    text: String,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Pair {
    a: i64,
    b: i64,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct UpTo {
    n: u32,
}

#[derive(Clone)]
struct Served {
    tool_router: ToolRouter<Self>,
}

#[tool_router]
impl Served {
    fn new() -> Self {
        Self { tool_router: Self::tool_router() }
    }

    #[tool(description = "Return the text.")]
    fn echo(&self, Parameters(Said { text }): Parameters<Said>) -> String {
        text
    }

    #[tool(description = "Return the sum.")]
    fn add(&self, Parameters(Pair { a, b }): Parameters<Pair>) -> String {
        (a + b).to_string()
    }

    #[tool(description = "Report every number on the way.")]
    async fn stream(
        &self,
        Parameters(UpTo { n }): Parameters<UpTo>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        if let Some(token) = context.meta.get_progress_token() {
            for step in 1..=n {
                let told = ProgressNotificationParam::new(token.clone(), step.into()).with_total(n.into());
                let _ = context.peer.notify_progress(told).await;
            }
        }
        Ok("done".into())
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Served {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }
}

fn cpu_seconds() -> f64 {
    let mut used = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut used) };
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32).as_secs_f64()
}

/// Calls `echo` so often, so many at a time, checks each text, and returns the seconds on the clock and of CPU.
async fn turn(peer: &Peer<RoleClient>, calls: usize, under_way: usize) -> Result<(f64, f64)> {
    let begun = Arc::new(AtomicUsize::new(0));
    let (wall, cpu) = (Instant::now(), cpu_seconds());
    let callers: Vec<_> = (0..under_way)
        .map(|_| {
            let (peer, begun) = (peer.clone(), begun.clone());
            tokio::spawn(async move {
                loop {
                    let number = begun.fetch_add(1, Ordering::Relaxed);
                    if number >= calls {
                        return Ok(());
                    }
                    let text = format!("hello {number}");
                    let arguments = object(serde_json::json!({ "text": &text }));
                    let params = CallToolRequestParams::new("echo").with_arguments(arguments);
                    let result = peer.call_tool(params).await?;
                    let found = result.content.first().and_then(|block| block.as_text());
                    ensure!(found.is_some_and(|found| found.text == text), "wanted {text:?}, got {found:?}");
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok((wall.elapsed().as_secs_f64(), cpu_seconds() - cpu))
}

async fn in_memory(calls: usize, under_way: usize) -> Result<()> {
    let (here, there) = tokio::io::duplex(1 << 16);
    let server = tokio::spawn(async move { anyhow::Ok(Served::new().serve(there).await?.waiting().await?) });
    let client = ().serve(here).await?;
    turn(client.peer(), calls / 8, under_way).await?;
    let (wall, cpu) = turn(client.peer(), calls, under_way).await?;
    println!("{wall} {cpu}");
    client.cancel().await?;
    server.await??;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words[0] == "memory" {
        return in_memory(words[1].parse()?, words[2].parse()?).await;
    }
    if words[0] == "stdio" {
        Served::new().serve(rmcp::transport::stdio()).await?.waiting().await?;
        return Ok(());
    }
    let served = Served::new();
    let json = words.iter().any(|word| word == "json");
    let config = StreamableHttpServerConfig::default().with_json_response(json);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(served.clone()), sessions, config);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}/mcp", listener.local_addr()?);
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, axum::Router::new().nest_service("/mcp", service)).await?;
    Ok(())
}
