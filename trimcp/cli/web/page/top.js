// `trimcp top --web`: the pictures of servers, and what one may do about what they show.
import {Ask, Progress, Spark, ask, bytes, count, follow, html, render, said, seconds, useEffect, useRef, useState} from "/base.js";
import {NOTHING, Wire, taken, useDrawn} from "/wire.js";

const KEPT = 120; // samples of a sparkline
const MORE = 100; // calls that are drawn at first: with every picture each of them is another
const REASON = "cancelled in the browser";
const SORTS = {
  age: row => -row.request.seconds,
  progress: row => -(row.request.total ? row.request.progress / row.request.total : 0),
  tool: row => row.tool,
  who: row => row.who,
};
const STATES = {running: "", waiting: "waits for a slot", asking: "asks its client", cancelled: "is being cancelled"};

function rowsOf(pictures, filter, sort) {
  const rows = [];
  for (const picture of pictures) for (const session of picture.sessions) for (const request of session.requests)
    rows.push({
      picture, session, request, key: `${picture.source} ${request.key}`,
      tool: said(request.target ?? request.method, 60), who: whoOf(session),
    });
  const wanted = filter.toLowerCase();
  const order = SORTS[sort], below = (a, b) => a < b ? -1 : a > b ? 1 : 0;
  return rows.filter(row => `${row.tool} ${row.who} ${row.picture.server}`.toLowerCase().includes(wanted))
    .sort((a, b) => below(order(a), order(b)) || below(a.key, b.key));
}

const came = session => `${session.transport ? `, ${session.transport}` : ""}${session.seconds === null ? "" : ` for ${seconds(session.seconds)}`}${session.address ? ` from ${said(session.address, 60)}` : ""}`;
const whoOf = session => said(session.principal ?? session.peer ?? session.owner ?? "a client", 60);

// What a sparkline shows of a server, by its name.
function figuresOf(picture) {
  const stats = picture.statistics, lanes = Object.entries(stats.lanes);
  return {
    running: stats.running, waiting: stats.waiting + stats.waiting_turns, sessions: stats.sessions,
    ...Object.fromEntries(lanes.filter(([, lane]) => lane.messages || lane.merged || lane.dropped)
      .map(([name, lane]) => [`lane ${name}`, lane.messages])),
  };
}

function App() {
  const [now, setNow] = useState({pictures: null, history: new Map()});
  const [trouble, setTrouble] = useState("");
  const [filter, setFilter] = useState(""), [sort, setSort] = useState("age");
  const [selected, setSelected] = useState(null), [opened, setOpened] = useState(false);
  const [question, setQuestion] = useState(null), [told, setTold] = useState(""), [listened, listen] = useState(null);
  const [room, setRoom] = useState(MORE);

  useEffect(() => {
    document.title = "trimcp top";
    const history = new Map();
    return follow("pictures", {}, pictures => {
      const there = new Set(pictures.map(one => one.source));
      for (const source of history.keys()) if (!there.has(source)) history.delete(source);
      for (const one of pictures) {
        const kept = history.get(one.source) ?? {};
        for (const [name, value] of Object.entries(figuresOf(one))) kept[name] = [...kept[name] ?? [], value].slice(-KEPT);
        history.set(one.source, kept);
      }
      setTrouble("");
      setNow({pictures, history});
    }, setTrouble);
  }, []);

  const rows = rowsOf(now.pictures ?? [], filter, sort);
  const chosen = rows.findIndex(one => one.key === selected), row = rows[chosen];
  const shown = rows.slice(0, Math.max(room, chosen + 1));
  const act = (source, members, done) => ask("act", {source, ...members}).then(() => setTold(done), error => setTold(error.message));
  const cancel = one => setQuestion({
    question: `Cancel ${one.tool} of ${one.who}?`, label: "The reason, for its handler and its caller", button: "Cancel it",
    done: reason => act(one.picture.source, {do: "cancel", request: one.request.key, reason: reason || REASON},
      `${one.tool} is being cancelled.`),
  });
  const close = (picture, session) => setQuestion({
    question: `Close the session of ${whoOf(session)}? Its calls are cancelled.`, label: "The reason", button: "Close it",
    done: reason => act(picture.source, {do: "close", session: session.key, reason: reason || REASON}, "The session is closed."),
  });
  const drain = picture => setQuestion({
    question: `Drain ${said(picture.server, 60)}? It takes no more calls; those under way have five seconds.`,
    button: "Drain it",
    done: () => act(picture.source, {do: "drain", reason: "drained in the browser"}, "The server is drained."),
  });

  const pressed = useRef(null); // what a key does with that which is drawn now
  pressed.current = event => {
    if (question || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const at = chosen;
    const move = step => {
      document.activeElement?.blur(); // Enter means what is selected from here on
      if (rows.length) setSelected(rows[Math.max(0, Math.min(rows.length - 1, at + step))].key);
    };
    const on = what => () => { // the call that is selected, or else the first
      const one = row ?? rows[0];
      if (!one) return setTold("There is no call.");
      setSelected(one.key);
      what(one);
    };
    const keys = {
      j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(at < 0 ? 1 : -1),
      Enter: on(one => setOpened(!(opened && one === row))), Escape: () => setOpened(false),
      c: on(cancel), x: on(one => close(one.picture, one.session)), d: on(one => drain(one.picture)), "/": () => document.getElementById("filter").focus(),
      s: () => setSort(Object.keys(SORTS)[(Object.keys(SORTS).indexOf(sort) + 1) % 4]),
    };
    if (!keys[event.key] || event.key === "Enter" && event.target.matches("button, summary")) return;
    event.preventDefault();
    keys[event.key]();
  };
  useEffect(() => {
    const press = event => pressed.current(event);
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);

  const stats = (now.pictures ?? []).map(one => one.statistics);
  const sum = name => stats.reduce((all, one) => all + one[name], 0);
  const ended = (now.pictures ?? []).flatMap(one => one.ended).sort((a, b) => b.at - a.at).slice(0, 50);
  return html`
    <header><h1>trimcp top</h1>
      <p>${now.pictures === null ? "connecting" : `${count(stats.length, "server")}, ${count(sum("sessions"), "session")}, `
        + `${sum("running").toLocaleString("en")} running, ${sum("waiting").toLocaleString("en")} waiting, `
        + `${sum("refused").toLocaleString("en")} refused`}</p>
      <p role="status" class="told">${trouble ? html`<b class="bad">${said(trouble)}</b>` : said(told)}</p></header>
    <main>
      ${now.pictures?.length === 0 && html`<p>No server of this user can be looked at; start one with
        <code> trimcp run server.py --http --admin</code></p>`}
      <section class="servers">${(now.pictures ?? []).map(one => html`
        <${Server} key=${one.source} picture=${one} history=${now.history.get(one.source) ?? {}} drain=${drain} close=${close} listen=${listen} />`)}
      </section>
      ${listened && html`<${Said} key=${`${listened.source} ${listened.session} ${listened.text}`} ...${listened} listen=${listen} />`}
      <section><div class="bar"><h2>Calls</h2>
        <label>Filter <input id="filter" type="search" value=${filter} onInput=${event => setFilter(event.target.value)} /></label>
        <label>Sort by <select value=${sort} onChange=${event => setSort(event.target.value)}>
          ${Object.keys(SORTS).map(name => html`<option key=${name} value=${name}>${name}</option>`)}</select></label></div>
        ${rows.length === 0 && html`<p class="dim">${filter ? "Nothing that runs has this." : "Nothing runs."}</p>`}
        <ul class="calls">${shown.map(one => html`
          <${Call} key=${one.key} row=${one} selected=${one.key === selected} opened=${opened && one.key === selected}
            open=${() => (setOpened(!(opened && one.key === selected)), setSelected(one.key))} cancel=${cancel} listen=${listen} />`)}</ul>
        ${rows.length > shown.length && html`<p class="bar dim">${count(rows.length - shown.length, "call")} below these; filter them, or
          <button onClick=${() => setRoom(room + MORE)}>Show more</button></p>`}
      </section>
      <section><h2>Ended</h2>
        ${ended.length === 0 && html`<p class="dim">Nothing has ended since this page looks.</p>`}
        <ol class="ended">${ended.map(one => html`<li key=${`${one.at} ${one.seconds}`} class=${one.outcome === "ok" ? "" : "warn"}>
          <span class="age">${seconds(one.seconds)}</span> <b>${said(one.target ?? one.method, 60)}</b>
          <span> ${one.outcome}${one.reason ? `: ${said(one.reason, 200)}` : ""}</span></li>`)}</ol></section>
      <p class="dim keys">Keys: ↑ ↓ select, Enter open, c cancel, x close its session, d drain its server, s sort, / filter</p>
    </main>
    ${question && html`<${Ask} ...${question} left=${() => setQuestion(null)}
      done=${text => (setQuestion(null), question.done(text))} />`}`;
}

// What is said in one session: asked for while it is shown.
function Said({source, session, who, text, listen}) {
  const [live, setLive] = useDrawn({...NOTHING, ended: null}), [trouble, setTrouble] = useState("");
  useEffect(() => follow("wire", {source, session, text}, batch => {
    setTrouble("");
    setLive(state => Object.assign(state, taken(state, batch), {ended: batch.ended}));
  }, setTrouble), []);
  return html`<${Wire} live=${live} title=${`Messages of ${who}`}>
    ${(trouble || live.ended) && html`<span class="warn">${said(trouble || live.ended)}</span>`}
    <label><input type="checkbox" checked=${text} onChange=${() => listen({source, session, who, text: !text})} /> with what is in them</label>
    <button onClick=${() => listen(null)}>Look away</button><//>`;
}

const Listen = ({picture, session, listen}) => html`<button onClick=${() => listen({source: picture.source, session: session.key, who: `${whoOf(session)}${session.address ? ` from ${said(session.address, 60)}` : ""}`, text: false})}>Messages</button>`;

// What is drawn only while it is open.
function Folded({summary, what}) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${event => setOpen(event.currentTarget.open)}><summary>${summary}</summary>${open && what()}</details>`;
}

function Server({picture, history, drain, close, listen}) {
  const stats = picture.statistics, memory = stats.memory;
  const lanes = Object.values(stats.lanes), all = name => lanes.reduce((sum, lane) => sum + lane[name], 0);
  const turns = Object.entries({...stats.threads && {threads: stats.threads}, ...stats.quotas});
  const hosts = Object.entries(stats.hosts);
  return html`<article class="server">
    <div class="bar"><h2>${said(picture.server, 60)} <small>${said(picture.version, 20)}, process ${picture.pid}</small></h2>
      <button onClick=${() => drain(picture)}>Drain…</button></div>
    <div class="sparks">${Object.entries(history).map(([name, values]) => html`<${Spark} key=${name} name=${name} values=${values} />`)}</div>
    <${Budget} memory=${memory} />
    <p class="dim">${all("dropped").toLocaleString("en")} messages dropped, ${all("merged").toLocaleString("en")} merged
      ${stats.processes && `; worker processes: ${stats.processes.busy} of ${stats.processes.alive} busy`}
      ${picture.more_requests > 0 && `; ${picture.more_requests} calls are not shown`}</p>
    ${hosts.length > 0 && html`<p class="dim">Over the network: ${hosts.map(([name, number]) => `${name.replace("_", " ")} ${number.toLocaleString("en")}`).join(", ")}</p>`}
    ${turns.length > 0 && html`<p class="dim">Turns: ${turns.map(([name, one]) =>
      `${said(name, 60)}: ${one.running} running, ${one.waiting} waiting`).join("; ")}</p>`}
    <${Folded} summary=${count(stats.sessions, "session")} what=${() => html`
      <ul class="sessions">${picture.sessions.map(one => html`<li key=${one.key}>
        <b>${whoOf(one)}</b> <span class="dim">${said(one.peer ?? "no name", 80)}, ${one.revision ?? "no revision yet"}${came(one)}, ${one.running} running, ${one.waiting} waiting, ${bytes(one.held)} held, ${bytes(one.unread)} unread</span>
        <div class="buttons"><${Listen} picture=${picture} session=${one} listen=${listen} />
          <button onClick=${() => close(picture, one)}>Close…</button></div></li>`)}</ul>
      ${picture.more_sessions > 0 && html`<p class="dim">and ${picture.more_sessions} more</p>`}`} />
    ${picture.beside.length > 0 && html`<${Folded} summary=${`Upstreams, providers, contexts: ${picture.beside.length}`} what=${() => html`
      <ul class="sessions">${picture.beside.map((one, at) => html`<li key=${at}><b>${one.kind} ${said(one.name, 60)}</b>
        <span class="dim">${said(one.state, 200)}${one.seconds === null ? "" : `, since ${seconds(one.seconds)}`}</span></li>`)}</ul>`} />`}
  </article>`;
}

function Budget({memory}) {
  const owners = Object.entries(memory.owners), named = owners.reduce((sum, [, held]) => sum + held, 0);
  const parts = [...owners, ["others", Math.max(0, memory.held - named)]].filter(([, held]) => held > 0);
  const width = held => ({width: `${100 * held / Math.max(1, memory.bound)}%`});
  return html`<figure class="budget"><figcaption>Held for clients: <b>${bytes(memory.held)}</b> of ${bytes(memory.bound)}
      ${owners.length > 0 && html`<span class="dim"> most by ${said(owners[0][0], 60)}, ${bytes(owners[0][1])}</span>`}</figcaption>
    <div class="stack" role="img" aria-label=${`${bytes(memory.held)} of ${bytes(memory.bound)}`}>
      ${parts.map(([name, held], at) => html`<span key=${name} class=${`part part${at % 5}`} style=${width(held)}
        title=${`${said(name, 60)}: ${bytes(held)}`}></span>`)}</div></figure>`;
}

function Call({row, selected, opened, open, cancel, listen}) {
  const {request, session, picture} = row, innermost = request.waits[request.waits.length - 1];
  const where = STATES[request.state] || (innermost ? said(innermost.trim(), 200) : "");
  return html`<li class=${selected ? "selected" : ""}>
    <div class="call"><button class="open" aria-expanded=${opened} onClick=${open}>${row.tool}</button>
      <span class="who">${row.who}</span><span class="age">${seconds(request.seconds)}</span>
      <${Progress} done=${request.progress} total=${request.total} rate=${request.per_second} message=${opened ? "" : request.message} />
      <code class="where">${where}</code>
      <button onClick=${() => cancel(row)} aria-label=${`Cancel ${row.tool}`}>Cancel…</button></div>
    ${opened && html`<div class="opened">
      <p>${said(request.method)}, request ${said(request.id, 60)}, of ${said(session.peer ?? "a client without a name", 80)},
        revision ${session.revision}${came(session)}, at ${said(picture.server, 60)} (process ${picture.pid})${" "}
        <${Listen} picture=${picture} session=${session} listen=${listen} /></p>
      <p>${request.state}${request.left !== null && `, ${seconds(request.left)} left to its deadline`}
        ${request.reason !== null && html`: <b class="warn">${said(request.reason)}</b>`}</p>
      ${request.message && html`<p>${said(request.message, 500)}</p>`}
      <h3>${request.waits.length ? "Waits at" : "Where it waits is not known"}</h3>
      <pre tabindex="0">${request.waits.map(line => said(line.trimEnd(), 400)).join("\n")}</pre></div>`}</li>`;
}

render(html`<${App} />`, document.getElementById("page"));
