// `trimcp inspect --web`: try what a server offers, answer what it asks, and see what is said.
import {Progress, ask, bytes, count, follow, html, lines, render, said, seconds, useEffect, useRef, useState} from "/base.js";
import {Fields, begun} from "/form.js";
import {NOTHING, Wire, taken, useDrawn} from "/wire.js";

const REMEMBERED = 50, LONGEST = 100_000;

function App() {
  const [offer, setOffer] = useState(null), [trouble, setTrouble] = useState("");
  const [chosen, choose] = useState(null), [filter, setFilter] = useState("");
  const [live, setLive] = useDrawn({...NOTHING, questions: [], lost: false});
  const [calls, setCalls] = useDrawn([]);

  const load = () => ask("offer", {}).then(found => {
    setOffer(found);
    document.title = `${said(found.serverInfo?.name ?? "a server", 40)} - trimcp inspect`;
  }, error => setTrouble(error.message));
  useEffect(() => {
    load();
    return follow("events", {}, batch => setLive(state => {
      Object.assign(state, taken(state, batch), {questions: batch.questions, lost: batch.lost});
      setTrouble("");
    }), setTrouble);
  }, []);

  // `given` is the arguments as JSON text, so that numbers stay as they were typed.
  const run = async (tool, given) => {
    const call = {id: crypto.randomUUID(), tool, given, state: "running", began: performance.now()};
    setCalls(all => { all.unshift(call); all.splice(REMEMBERED); });
    const edit = members => setCalls(() => Object.assign(call, members));
    try {
      for await (const line of lines("call", `{"id":"${call.id}","tool":${JSON.stringify(tool)},"arguments":${given}}`)) {
        if (line.error !== undefined) edit({state: line.error === "cancelled" ? "cancelled" : "error", ...line});
        else if (line.done !== undefined) edit({state: line.done.isError ? "failed" : "done", ...line});
        else edit(line);
      }
      if (call.state === "running") edit({state: "error", error: "The command has ended."});
    } catch (error) {
      edit({state: "error", error: error.message});
    }
  };
  const show = async (name, members) => {
    const call = {id: crypto.randomUUID(), tool: `${name} ${Object.values(members)[0]}`, state: "running", other: true, began: performance.now()};
    setCalls(all => { all.unshift(call); all.splice(REMEMBERED); });
    await ask(name, members).then(done => setCalls(() => Object.assign(call, {state: "done", done})),
      error => setCalls(() => Object.assign(call, {state: "error", error: error.message})));
  };

  const lists = offer === null ? [] : [
    ["Tools", offer.tools.map(one => ({kind: "tool", name: one.name, title: one.title, one}))],
    ["Resources", offer.resources.map(one => ({kind: "resource", name: one.uri, title: one.title ?? one.name, one}))],
    ["Templates", offer.resourceTemplates.map(one => ({kind: "template", name: one.uriTemplate, title: one.title ?? one.name, one}))],
    ["Prompts", offer.prompts.map(one => ({kind: "prompt", name: one.name, title: one.title, one}))],
  ];
  const wanted = filter.toLowerCase();
  return html`
    <header><h1>${offer === null ? "trimcp inspect" : said(offer.serverInfo?.name ?? "a server without a name", 60)}</h1>
      <p class="dim">${offer && `${said(offer.serverInfo?.version ?? "", 30)} speaks ${offer.protocolVersion}`}</p>
      <p role="status" class="told">${(trouble || live.lost) && html`<b class="bad">${said(trouble || "The server is gone.")}</b>`}</p></header>
    <main class="inspect">
      <nav aria-label="What the server offers">
        <label>Filter <input type="search" value=${filter} onInput=${event => setFilter(event.target.value)} /></label>
        ${lists.map(([title, all]) => all.length > 0 && html`<h2>${title} <small>${all.length}</small></h2><ul>
          ${all.filter(one => `${one.name} ${one.title ?? ""}`.toLowerCase().includes(wanted)).slice(0, 500).map(one => html`
            <li key=${one.name}><button class="open" aria-current=${chosen?.kind === one.kind && chosen?.name === one.name}
              onClick=${() => choose(one)}>${said(one.name, 80)}</button></li>`)}</ul>`)}
        ${offer?.errors && Object.entries(offer.errors).map(([name, why]) => html`<p class="bad">${said(name, 60)}: ${said(why)}</p>`)}
      </nav>
      <div class="work">
        ${offer?.instructions && !chosen && html`<section><h2>Instructions</h2><pre>${said(offer.instructions, 5000)}</pre></section>`}
        ${chosen?.kind === "tool" && html`<${Tool} key=${chosen.name} tool=${chosen.one} run=${run} />`}
        ${chosen && chosen.kind !== "tool" && html`<${Other} key=${chosen.kind + chosen.name} chosen=${chosen} show=${show} />`}
        <section><h2>Calls</h2>
          ${calls.length === 0 && html`<p class="dim">Choose a tool to call it.</p>`}
          <ul class="calls">${calls.map(call => html`<${Made} key=${call.id} call=${call} run=${run} drawn=${call.state + call.progress} />`)}</ul></section>
        <${Wire} live=${live} title="Messages" />
      </div>
    </main>
    ${live.questions.length > 0 && html`<${Question} key=${live.questions[0].id} question=${live.questions[0]} />`}`;
}

function Tool({tool, run}) {
  const schema = tool.inputSchema ?? {}, simple = schema.properties && Object.keys(schema.properties).length > 0;
  const [value, change] = useState(() => begun({type: "object", ...schema}, schema) ?? {});
  const [raw, setRaw] = useState(null);
  const hints = Object.entries(tool.annotations ?? {}).filter(([name, told]) => name.endsWith("Hint") && told === true)
    .map(([name]) => name.slice(0, -4)).join(", ");
  const submit = event => {
    event.preventDefault();
    run(tool.name, raw ?? JSON.stringify(value));
  };
  const check = event => {
    setRaw(event.target.value);
    let problem = "";
    try {
      const typed = JSON.parse(event.target.value);
      if (typed === null || typeof typed !== "object" || Array.isArray(typed)) problem = "The arguments are an object.";
    } catch (error) { problem = error.message; }
    event.target.setCustomValidity(problem);
  };
  return html`<section><form onSubmit=${submit}>
    <h2>${said(tool.name, 120)} <small>${said(tool.title ?? "", 100)}</small></h2>
    ${tool.description && html`<p>${said(tool.description, 3000)}</p>`}
    ${hints && html`<p class="dim">It says of itself: ${said(hints, 200)}</p>`}
    ${raw !== null ? html`<label>Arguments as JSON <textarea name="raw" rows="8" value=${raw} onInput=${check}></textarea></label>`
      : simple ? html`<${Fields} schema=${schema} value=${value} change=${change} />`
        : html`<p class="dim">Its schema names no arguments; others can be given as JSON.</p>`}
    <p class="buttons"><button class="main">Call</button>
      <button type="button" onClick=${() => setRaw(raw === null ? JSON.stringify(value, null, 2) : null)}>${raw === null ? "As JSON" : "As a form"}</button></p>
  </form></section>`;
}

function Other({chosen, show}) {
  const [uri, setUri] = useState(chosen.name), [given, give] = useState({});
  const prompt = chosen.kind === "prompt", named = chosen.one.arguments ?? [];
  const submit = event => {
    event.preventDefault();
    if (prompt) show("prompt", {name: chosen.name, arguments: given});
    else show("read", {uri});
  };
  return html`<section><form onSubmit=${submit}><h2>${said(chosen.name, 200)} <small>${said(chosen.title ?? "", 100)}</small></h2>
    ${chosen.one.description && html`<p>${said(chosen.one.description, 2000)}</p>`}
    ${prompt ? named.map(one => html`<label class="field" key=${one.name}><span class="name">${said(one.name, 80)}${one.required && "*"}</span>
        <small>${said(one.description ?? "", 300)}</small><input name=${one.name} required=${one.required === true}
          onInput=${event => give({...given, [one.name]: event.target.value})} /></label>`)
      : html`<label class="field">Address <input name="uri" required value=${uri} onInput=${event => setUri(event.target.value)} /></label>`}
    <p class="buttons"><button class="main">${prompt ? "Fill in" : "Read"}</button></p></form></section>`;
}

function Made({call, run}) {
  const [reason, setReason] = useState(""), [programs, setPrograms] = useState(null), [problem, setProblem] = useState("");
  const cancel = event => {
    event.preventDefault();
    ask("cancel", {id: call.id, reason}).catch(error => setProblem(error.message));
  };
  const expected = (call.done?.content ?? []).filter(one => one.type === "text").map(one => one.text).join("");
  const write = () => programs ? setPrograms(null)
    : ask("export", `{"tool":${JSON.stringify(call.tool)},"arguments":${call.given},"expected":${JSON.stringify(expected)}}`)
      .then(setPrograms, error => setProblem(error.message));
  const bad = ["error", "failed"].includes(call.state), rate = call.progress / ((performance.now() - call.began) / 1000);
  return html`<li><div class="bar"><b class="tool">${said(call.tool, 120)}</b>
      <span class=${bad ? "bad" : call.state === "cancelled" ? "warn" : "dim"}>${call.state}${call.seconds !== undefined ? ` after ${seconds(call.seconds)}` : ""}</span>
      ${call.state === "running" && !call.other && html`<form class="cancel" onSubmit=${cancel}>
        <input aria-label="Reason to cancel" placeholder="reason" value=${reason} onInput=${event => setReason(event.target.value)} />
        <button>Cancel</button></form>`}
      ${call.state !== "running" && !call.other && html`<button onClick=${() => run(call.tool, call.given)}>Repeat</button>
        <button aria-expanded=${programs !== null} onClick=${write}>As programs</button>`}</div>
    ${call.given && call.given !== "{}" && html`<code class="where">${said(call.given, 400)}</code>`}
    ${call.state === "running" && html`<${Progress} done=${call.progress} total=${call.total} message=${call.message} rate=${rate} />`}
    ${(call.error !== undefined || problem) && html`<p class="bad">${said(problem || call.error, 2000)}${call.code !== undefined && call.code !== null && ` (code ${call.code})`}</p>`}
    ${call.data !== undefined && call.data !== null && html`<pre>${said(JSON.stringify(call.data, null, 2), 5000)}</pre>`}
    ${call.done && html`<${Result} result=${call.done} />`}
    ${programs && Object.entries(programs).map(([kind, text]) => html`<h3 key=${kind}>${kind}
      <button onClick=${() => navigator.clipboard.writeText(text)}>Copy</button></h3><pre tabindex="0" class="program">${text}</pre>`)}</li>`;
}

function Result({result}) {
  const blocks = result.content ?? result.contents ?? result.messages?.map(one => ({...one.content, role: one.role})) ?? [];
  const size = data => bytes(Math.floor(data.length * 3 / 4));
  return html`${blocks.map((one, at) => {
    const text = one.text ?? one.resource?.text, data = one.data ?? one.blob ?? one.resource?.blob;
    const told = text ?? (data !== undefined ? `[${one.mimeType ?? one.resource?.mimeType ?? one.type}, ${size(data)}]` : JSON.stringify(one));
    return html`<pre key=${at} tabindex="0" class="result">${one.role ? `${said(one.role, 20)}: ` : ""}${said(told, LONGEST)}</pre>`;
  })}
  ${result.structuredContent !== undefined && html`<details><summary>structured</summary>
    <pre tabindex="0">${said(JSON.stringify(result.structuredContent, null, 2), LONGEST)}</pre></details>`}`;
}

function Question({question}) {
  const box = useRef(null), answered = useRef(false), schema = question.requestedSchema;
  const [value, change] = useState(() => schema ? begun({type: "object", ...schema}) ?? {} : {}), [problem, setProblem] = useState("");
  useEffect(() => box.current.showModal(), []);
  const answer = (action, content) => {
    if (answered.current) return;
    answered.current = true;
    ask("answer", {id: question.id, action, content}).catch(error => { answered.current = false; setProblem(error.message); });
  };
  return html`<dialog ref=${box} onClose=${() => answer("cancel")} aria-label="The server asks">
    <form onSubmit=${event => (event.preventDefault(), answer("accept", schema ? value : undefined))}>
      <h2>The server asks</h2><p class="asked">${said(question.message, 3000)}</p>
      ${schema && html`<${Fields} schema=${schema} value=${value} change=${change} />`}
      ${question.url !== undefined && html`<p>It wants this address to be opened, which nothing here does:</p><pre>${said(question.url, 2000)}</pre>`}
      ${problem && html`<p class="bad">${said(problem)}</p>`}
      <p class="buttons"><button class="main">${schema ? "Answer" : "Agree"}</button>
        <button type="button" onClick=${() => answer("decline")}>Decline</button>
        <button type="button" onClick=${() => box.current.close()}>Cancel</button></p>
    </form></dialog>`;
}

render(html`<${App} />`, document.getElementById("page"));
