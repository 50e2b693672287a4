// Forms from JSON Schema: strings, numbers, choices, lists and nested objects; what is none of these is typed as JSON.
import {html, said, useState} from "/base.js";

const DEEPEST = 6;

// The schema that is meant: references inside the document are followed, and of "this or null" it is this.
function meant(schema, root, left = 20) {
  if (schema === null || typeof schema !== "object" || left === 0) return {};
  if (typeof schema.$ref === "string") {
    const steps = schema.$ref.replace(/^#\/?/, "").split("/").filter(step => step);
    const found = steps.reduce((at, step) => at?.[decodeURI(step).replace(/~1/g, "/").replace(/~0/g, "~")], root);
    return {...meant(found, root, left - 1), ...schema.description && {description: schema.description},
      ..."default" in schema && {default: schema.default}};
  }
  const ways = (schema.anyOf ?? schema.oneOf ?? []).filter(way => way?.type !== "null");
  if (ways.length === 1 && !("const" in ways[0])) return {...schema, anyOf: undefined, oneOf: undefined, ...meant(ways[0], root, left - 1)};
  return schema;
}

// What can be chosen, as pairs of a value and its title; null if it is no choice.
function choicesOf(schema) {
  const listed = schema.oneOf ?? schema.anyOf;
  if (Array.isArray(listed) && listed.length && listed.every(way => way && "const" in way))
    return listed.map(way => [way.const, way.title ?? way.const]);
  const values = schema.enum ?? ("const" in schema ? [schema.const] : null);
  if (!Array.isArray(values) || values.some(value => typeof value === "object" && value !== null)) return null;
  return values.map((value, at) => [value, schema.enumNames?.[at] ?? value]);
}

function kindOf(schema, depth) {
  if (choicesOf(schema)) return "choice";
  const kind = Array.isArray(schema.type) ? schema.type.find(one => one !== "null") : schema.type;
  if (["string", "number", "integer", "boolean"].includes(kind)) return kind;
  if (depth < DEEPEST && kind === "object" && schema.properties && Object.keys(schema.properties).length) return "object";
  if (depth < DEEPEST && kind === "array" && schema.items && typeof schema.items === "object") return "array";
  return "json";
}

// The value that a form begins with; undefined is left out.
export function begun(schema, root = schema, required = true, depth = 0) {
  const one = meant(schema, root);
  if ("default" in one) return one.default;
  if (!required) return undefined;
  const kind = kindOf(one, depth);
  if (kind === "boolean") return false;
  if (kind === "array") return [];
  if (kind === "string") return "";
  if (kind !== "object") return undefined;
  const values = Object.entries(one.properties)
    .map(([name, member]) => [name, begun(member, root, (one.required ?? []).includes(name), depth + 1)]);
  return Object.fromEntries(values.filter(([, value]) => value !== undefined));
}

export function Fields({schema, root = schema, value, change, depth = 0}) {
  const one = meant(schema, root), required = one.required ?? [];
  const set = (name, member) => {
    const next = {...value, [name]: member};
    if (member === undefined) delete next[name];
    change(next);
  };
  return Object.entries(one.properties ?? {}).map(([name, member]) => html`
    <${Field} key=${name} name=${name} schema=${member} root=${root} required=${required.includes(name)}
      value=${Object.hasOwn(value ?? {}, name) ? value[name] : undefined} change=${next => set(name, next)} depth=${depth} />`);
}

function Field({name, schema, root, required, value, change, depth}) {
  const one = meant(schema, root), kind = kindOf(one, depth);
  const title = html`<span class="name">${said(one.title ?? name, 80)}${required ? html`<abbr title="required">*</abbr>` : ""}</span>`;
  const about = one.description && html`<small>${said(one.description, 400)}</small>`;
  if (kind === "object") return html`<fieldset><legend>${title} ${about}</legend>
    ${value === undefined
      ? html`<button type="button" onClick=${() => change(begun({...one, default: undefined, type: "object"}, root) ?? {})}>Add</button>`
      : html`<${Fields} schema=${one} root=${root} value=${value} change=${change} depth=${depth + 1} />`}
    ${value !== undefined && !required && html`<button type="button" onClick=${() => change(undefined)}>Leave out</button>`}</fieldset>`;
  if (kind === "array") return html`<${List} ...${{title, about, one, root, required, change, depth}} value=${value} />`;
  return html`<label class="field">${title} ${about}<${Input} ...${{one, kind, required, value, change}} label=${name} /></label>`;
}

function List({title, about, one, root, required, value, change, depth}) {
  const items = meant(one.items, root), chosen = choicesOf(items), kept = value ?? [];
  const set = next => change(next.length || required ? next : undefined);
  if (chosen) return html`<fieldset><legend>${title} ${about}</legend>${chosen.map(([option, named]) => html`
    <label class="tick" key=${String(option)}><input type="checkbox" checked=${kept.includes(option)}
      onChange=${event => set(event.target.checked ? [...kept, option] : kept.filter(each => each !== option))} /> ${said(named, 80)}</label>`)}</fieldset>`;
  const replace = (at, next) => set(kept.map((each, place) => place === at ? next : each));
  return html`<fieldset><legend>${title} ${about}</legend>${kept.map((each, at) => html`<div class="item" key=${at}>
      <${Field} name=${`${at + 1}`} schema=${one.items} root=${root} required=${true} value=${each}
        change=${next => replace(at, next)} depth=${depth + 1} />
      <button type="button" aria-label=${`Remove ${at + 1}`} onClick=${() => set(kept.filter((_, place) => place !== at))}>Remove</button></div>`)}
    <button type="button" onClick=${() => set([...kept, begun(one.items, root, true, depth + 1) ?? null])}>Add one</button></fieldset>`;
}

function Input({one, kind, required, value, change, label}) {
  const common = {name: label, required};
  if (kind === "choice" || kind === "boolean" && !required) {
    const choices = choicesOf(one) ?? [[true, "yes"], [false, "no"]];
    const at = choices.findIndex(([option]) => option === value);
    return html`<select ...${common} value=${String(at)} onChange=${event => change(choices[event.target.value]?.[0])}>
      ${(!required || at < 0) && html`<option value=${required ? "" : "-1"}></option>`}
      ${choices.map(([, named], place) => html`<option key=${place} value=${String(place)}>${said(named, 80)}</option>`)}</select>`;
  }
  if (kind === "boolean") return html`<input type="checkbox" name=${label} checked=${value === true}
    onChange=${event => change(event.target.checked)} />`;
  if (kind === "number" || kind === "integer") return html`<input ...${common} type="number" step=${kind === "integer" ? 1 : "any"}
    min=${one.minimum} max=${one.maximum} value=${value ?? ""} onInput=${event => {
      const number = event.target.value === "" ? undefined : Number(event.target.value);
      const exact = number === undefined || !Number.isInteger(number) || Number.isSafeInteger(number);
      event.target.setCustomValidity(exact ? "" : "Too large for a form: type it as JSON.");
      change(number);
    }} />`;
  if (kind === "string") {
    const type = {email: "email", uri: "url", date: "date"}[one.format] ?? "text";
    const set = event => change(event.target.value === "" && !required ? undefined : event.target.value);
    const bounds = {minlength: one.minLength, maxlength: one.maxLength, required: required && (one.minLength > 0 || type !== "text")};
    return type === "text" && !(one.maxLength <= 200)
      ? html`<textarea name=${label} rows=${String(value ?? "").includes("\n") ? 6 : 1} ...${bounds} value=${value ?? ""} onInput=${set}></textarea>`
      : html`<input name=${label} type=${type} ...${bounds} value=${value ?? ""} onInput=${set} />`;
  }
  return html`<${Json} ...${common} value=${value} change=${change} />`;
}

function Json({name, required, value, change}) {
  const [text, setText] = useState(value === undefined ? "" : JSON.stringify(value));
  return html`<textarea name=${name} required=${required} rows="2" placeholder="JSON" value=${text} onInput=${event => {
    const typed = event.target.value;
    setText(typed);
    try {
      change(typed.trim() === "" ? undefined : JSON.parse(typed));
      event.target.setCustomValidity("");
    } catch (error) {
      event.target.setCustomValidity(`This is not JSON: ${error.message}`);
    }
  }}></textarea>`;
}
