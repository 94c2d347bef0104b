"use strict";
/* Asks /v1/chat/completions as a stream and shows what /metrics says meanwhile. Text only ever becomes text nodes. */
(() => {
  const POLL_MS = 2000, POLL_AFTER_FAILURE_MS = 10000, SETTLE_MS = 300, SETTLE_TRIES = 10;
  const CHAT = "/v1/chat/completions";
  const STAGES = [
    "receive", "admission", "tokenize", "fetch", "decode", "preprocess", "queue", "encode", "transfer", "prefill",
    "generation",
  ];
  const el = (id) => document.getElementById(id);
  const make = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const seconds = (s) => (s < 1 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(2)} s`);
  const count = (n) => Math.round(n).toLocaleString("en");
  const bytes = (n) => {
    const unit = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
    return `${(n / 1024 ** unit).toFixed(unit ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };

  // ---- Prometheus's text format: a list of {name, labels, value}
  const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
  const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
  const ESCAPES = { n: "\n", "\\": "\\", '"': '"' };
  function parseMetrics(text) {
    const samples = [];
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (!match) continue;
      const labels = {};
      for (const [, name, value] of (match[2] || "").matchAll(LABEL)) {
        labels[name] = value.replace(/\\(.)/g, (_, c) => ESCAPES[c] ?? c);
      }
      samples.push({ name: match[1], labels, value: Number(match[3]) });
    }
    return samples;
  }

  /** Sums over replicas: Map from the values of `by`, joined by a space, to the sum. */
  function sums(samples, name, ...by) {
    const found = new Map();
    for (const sample of samples) {
      if (sample.name !== `sightline_${name}`) continue;
      const key = by.map((label) => sample.labels[label]).join(" ");
      found.set(key, (found.get(key) ?? 0) + sample.value);
    }
    return found;
  }

  /** What grew between two scrapes; a replica that has died meanwhile makes nothing negative. */
  function growth(before, after, name, ...by) {
    const earlier = sums(before, name, ...by);
    const grown = [...sums(after, name, ...by)].map(([key, value]) => [key, value - (earlier.get(key) ?? 0)]);
    return new Map(grown.filter(([, value]) => value > 0));
  }

  let latest = null;
  async function scrape() {
    const answer = await fetch("metrics", { cache: "no-store" });
    if (!answer.ok) throw new Error(`/metrics answered ${answer.status}`);
    return (latest = parseMetrics(await answer.text()));
  }

  // ---- Server-sent events: the `data` of each event
  async function* events(body) {
    const decoder = new TextDecoder();
    const reader = body.getReader();
    let text = "", data = [];
    for (;;) {
      const { done, value } = await reader.read();
      text += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = text.split(/\r\n|\n|\r(?!$)/);
      text = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
      if (done) return;
    }
  }

  // ---- The picture
  let picture = null;
  function readPicture(file) {
    if (!file.type.startsWith("image/")) {
      el("picture-note").textContent = `${file.name || "This"} is not a picture.`;
      return;
    }
    const reader = new FileReader();
    reader.onload = () => {
      picture = reader.result;
      el("preview").src = picture;
      el("preview").hidden = el("remove").hidden = false;
      el("picture-note").textContent = `${file.name || "Pasted picture"}, ${bytes(file.size)}`;
    };
    reader.onerror = () => { el("picture-note").textContent = "The picture could not be read."; };
    reader.readAsDataURL(file);
  }
  function removePicture() {
    picture = null;
    el("preview").hidden = el("remove").hidden = true;
    el("preview").removeAttribute("src");
    el("picture").value = "";
    el("picture-note").textContent = "No picture: the question goes alone.";
    el("picture").focus();
  }
  el("picture").addEventListener("change", (event) => event.target.files[0] && readPicture(event.target.files[0]));
  el("remove").addEventListener("click", removePicture);
  document.addEventListener("paste", (event) => event.clipboardData.files[0] && readPicture(event.clipboardData.files[0]));
  document.addEventListener("dragover", (event) => { event.preventDefault(); el("drop").classList.add("over"); });
  document.addEventListener("dragleave", () => el("drop").classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    el("drop").classList.remove("over");
    if (event.dataTransfer.files[0]) readPicture(event.dataTransfer.files[0]);
  });

  // ---- The server
  const headers = () => {
    const key = el("key").value.trim();
    return key ? { Authorization: `Bearer ${key}` } : {};
  };
  async function askWhatIsServed() {
    try {
      const answer = await fetch("v1/models", { headers: headers() });
      if (answer.status === 401) {
        el("server").textContent = "This server wants an API key: see Options.";
        el("options").open = true;
        return;
      }
      const { data } = await answer.json();
      el("model").value ||= data[0].id;
      el("server").textContent = `${data.map((model) => model.id).join(", ")} · context of ${count(data[0].max_model_len)} tokens`;
    } catch {
      el("server").textContent = "The server does not say what it serves.";
    }
  }
  el("key").addEventListener("change", askWhatIsServed);

  // ---- One request
  let running = null;
  function problem(text) {
    el("problem").textContent = text;
    el("problem").hidden = !text;
  }
  function requestBody() {
    const content = [{ type: "text", text: el("question").value }];
    if (picture) content.unshift({ type: "image_url", image_url: { url: picture } });
    return JSON.stringify({
      model: el("model").value,
      messages: [{ role: "user", content }],
      max_tokens: el("max-tokens").valueAsNumber || 256,
      temperature: Number.isNaN(el("temperature").valueAsNumber) ? 0 : el("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    });
  }
  async function refusal(answer) {
    try {
      const { error } = await answer.json();
      return `${error.message}${error.param ? ` (${error.param})` : ""}`;
    } catch {
      return `The server answered ${answer.status}.`;
    }
  }

  async function ask() {
    const seen = { started: performance.now(), first: null, last: null, usage: null, finish: null, extra: {} };
    running = new AbortController();
    const before = latest;
    const answer = await fetch(CHAT.slice(1), {
      method: "POST", body: requestBody(), signal: running.signal,
      headers: { "Content-Type": "application/json", "X-Sightline-Timings": "1", ...headers() },
    });
    if (!answer.ok) throw new Error(await refusal(answer));
    let ended = false;
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") { ended = true; continue; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) seen.usage = chunk.usage;
      if (chunk.sightline) Object.assign(seen.extra, chunk.sightline);
      const choice = chunk.choices?.[0];
      if (choice?.finish_reason) seen.finish = choice.finish_reason;
      if (choice?.delta?.content) {
        seen.last = performance.now();
        seen.first ??= seen.last;
        el("answer").append(choice.delta.content);
        el("answer").scrollTop = el("answer").scrollHeight;
        showFigures(seen);
      }
    }
    seen.ended = performance.now();
    showFigures(seen);
    if (!ended) throw new Error("The stream broke off before its end.");
    el("ending").textContent = { stop: "Finished.", length: "Cut at the most tokens." }[seen.finish] ?? `Ended: ${seen.finish}.`;
    await showWork(seen, before);
  }

  function showFigures(seen) {
    const details = seen.usage?.prompt_tokens_details ?? {};
    const tokens = seen.usage?.completion_tokens;
    const between = tokens > 1 && seen.last > seen.first ? (seen.last - seen.first) / 1000 / (tokens - 1) : null;
    const figures = [
      ["First text", seen.first === null ? null : seconds((seen.first - seen.started) / 1000)],
      ["Between tokens", between === null ? null : seconds(between)],
      ["Whole request", seen.ended ? seconds((seen.ended - seen.started) / 1000) : null],
      ["Prompt tokens", seen.usage && count(seen.usage.prompt_tokens)],
      ["Image tokens", details.image_tokens === undefined ? null : count(details.image_tokens)],
      ["Cached tokens", details.cached_tokens === undefined ? null : count(details.cached_tokens)],
      ["Answer tokens", tokens === undefined ? null : count(tokens)],
    ];
    el("figures").replaceChildren(...figures.map(([name, value]) => {
      const pair = make("div");
      pair.append(make("dt", name), make("dd", value ?? "–"));
      return pair;
    }));
  }

  /** Stage times and cache results: of this very request if the stream said so, else what /metrics gained meanwhile. */
  async function showWork(seen, before) {
    let after = null, requests = 0;
    for (let tries = 0; before && tries < SETTLE_TRIES && requests < 1; tries++) {
      if (tries) await new Promise((resolve) => setTimeout(resolve, SETTLE_MS));
      after = await scrape().catch(() => after);
      requests = after ? growth(before, after, "request_seconds_count", "endpoint").get(CHAT) ?? 0 : 0;
    }
    const gained = (name, ...by) => (before && after ? growth(before, after, name, ...by) : new Map());
    const others = requests > 1 ? `Mean of ${count(requests)} requests that ended meanwhile.` : "From the server's metrics.";
    const own = seen.extra.stage_seconds;
    const stages = own ? new Map(Object.entries(own)) : gained("request_stage_seconds_sum", "stage");
    const divisor = own ? 1 : Math.max(1, requests);
    el("stages-note").textContent = own ? "Of this request." : others;
    showStages(STAGES.filter((stage) => stages.has(stage)).map((stage) => [stage, stages.get(stage) / divisor]));
    const lookups = gained("cache_lookups_total", "tier", "result");
    const ownLookups = seen.extra.cache_results;
    el("caches-note").textContent = ownLookups ? "Of this request." : "Of all requests meanwhile.";
    const found = ownLookups ? Object.entries(ownLookups).map(([key, n]) => [...key.split(/[ :.]/), n])
      : [...lookups].map(([key, n]) => [...key.split(" "), n]);
    fill("caches", found.map(([tier, result, n]) => [tier, result, count(n)]), 3);
  }

  function showStages(stages) {
    const total = Math.max(1e-9, ...stages.map(([, value]) => value));
    el("stages").replaceChildren(...stages.map(([stage, value]) => {
      const row = make("tr"), cell = make("td", undefined, { "aria-hidden": "true" }), bar = make("div", undefined, { class: "bar" });
      bar.style.width = `${(100 * value) / total}%`;
      cell.append(bar);
      row.append(make("th", stage, { scope: "row" }), make("td", seconds(value)), cell);
      return row;
    }));
    if (!stages.length) fill("stages", [], 3);
  }

  function fill(id, rows, columns) {
    const made = rows.map((cells) => {
      const row = make("tr");
      row.append(...cells.map((text, index) => (index ? make("td", text) : make("th", text, { scope: "row" }))));
      return row;
    });
    const nothing = make("tr");
    nothing.append(make("td", "none", { colspan: columns }));
    el(id).replaceChildren(...(made.length ? made : [nothing]));
  }

  el("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    problem("");
    el("answer").replaceChildren();
    el("ending").textContent = "";
    el("send").disabled = true;
    el("stop").disabled = false;
    el("answer").setAttribute("aria-busy", "true");
    try {
      await ask();
    } catch (error) {
      if (error.name === "AbortError") el("ending").textContent = "Stopped.";
      else problem(error.message);
    } finally {
      running = null;
      el("send").disabled = false;
      el("stop").disabled = true;
      el("answer").setAttribute("aria-busy", "false");
    }
  });
  el("stop").addEventListener("click", () => running?.abort());
  el("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) el("ask").requestSubmit();
  });

  // ---- Budgets, live
  const meters = new Map();
  function gauge(name, used, total, text) {
    if (!meters.has(name)) {
      const box = make("div", undefined, { class: "gauge" });
      const meter = make("meter", undefined, { min: 0, "aria-label": name });
      const value = make("span");
      box.append(make("span", name), value, meter);
      el("gauges").append(box);
      meters.set(name, { meter, value });
    }
    const { meter, value } = meters.get(name);
    meter.max = Math.max(1, total);
    meter.high = meter.max * 0.9;
    meter.value = used;
    meter.textContent = value.textContent = text;
  }
  function states(samples, name) {
    const found = sums(samples, name, "state");
    return (state) => found.get(state) ?? 0;
  }
  function showMetrics(samples) {
    for (const [title, name] of [["KV blocks", "kv_blocks"], ["Embedding slots", "embedding_slots"]]) {
      const state = states(samples, name), used = state("used"), total = used + state("cached") + state("free");
      gauge(title, used, total, `${count(used)} of ${count(total)} used, ${count(state("cached"))} cached`);
    }
    for (const [title, name, waits] of [["Sequences", "scheduler_requests", "waiting"], ["Requests", "requests_in_flight", "queued"]]) {
      const state = states(samples, name), now = state("running"), later = state(waits);
      gauge(title, now, now + later, `${count(now)} running, ${count(later)} ${waits}`);
    }
    const denials = sums(samples, "budget_rejections_total", "budget", "outcome");
    const budgets = [...new Set([...denials].filter(([, n]) => n > 0).map(([key]) => key.split(" ")[0]))].sort();
    fill("denials", budgets.map((budget) =>
      [budget, count(denials.get(`${budget} deferred`) ?? 0), count(denials.get(`${budget} rejected`) ?? 0)]), 3);
    const lookups = sums(samples, "cache_lookups_total", "tier", "result"), held = sums(samples, "cache_bytes", "tier");
    const open = sums(samples, "cache_breaker_open", "tier");
    const tiers = [...new Set([...held.keys(), ...[...lookups.keys()].map((key) => key.split(" ")[0])])].sort();
    const of = (tier, result) => lookups.get(`${tier} ${result}`) ?? 0;
    fill("tiers", tiers.map((tier) => [
      open.get(tier) ? `${tier} (skipped)` : tier, held.has(tier) ? bytes(held.get(tier)) : "–",
      count(of(tier, "hit")), count(of(tier, "miss")), count(of(tier, "error") + of(tier, "corrupt")),
    ]), 5);
  }
  let timer = null;
  async function poll() {
    timer = null;
    let wait_ms = POLL_MS;
    try {
      showMetrics(await scrape());
      el("metrics-note").textContent = "Over all replicas, every 2 seconds.";
    } catch (error) {
      el("metrics-note").textContent = `No figures: ${error.message}`;
      wait_ms = POLL_AFTER_FAILURE_MS;
    }
    if (!document.hidden) timer ??= setTimeout(poll, wait_ms);
  }
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    timer = null;
    if (!document.hidden) poll();
  });

  askWhatIsServed();
  poll();
})();
