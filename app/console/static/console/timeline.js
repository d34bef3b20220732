/* The phase timeline: one lane a job, coloured by what was done for it.
 *
 * <div data-timeline data-src="/console/data/timeline?minutes=10"> is filled here: lane names as links, a canvas with
 * the lanes, a line that tells of the stretch under pointer or arrow keys, and a table that says the same.
 * Training takes a lane's whole height; rollout its upper and environment its lower half, as both may go on at once;
 * waiting is a thin line. With [data-versions] each lane has a row of version labels. [data-once]: no polling.
 */
"use strict";

(() => {
  const LANE = 30;
  const BAR = 18;
  const LABELS = 16; // height of the row of version labels
  const AXIS = 22;
  const PHASES = ["rollout", "environment", "training", "waiting"];
  const OVER = ["succeeded", "failed", "cancelled"];
  const SHARE = { rollout: [0, 0.5], environment: [0.5, 0.5], training: [0, 1], waiting: [0.42, 0.16] };

  const css = marlaas.color;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** A preflight has its job's name, and no page of its own. */
  const owner = (lane) => (lane.kind === "preflight" ? `${lane.tenant}, preflight` : lane.tenant);

  function seconds(value) {
    if (value < 10) return `${value.toFixed(1)} s`;
    if (value < 90) return `${Math.round(value)} s`;
    if (value < 5400) return `${(value / 60).toFixed(1)} min`;
    return `${(value / 3600).toFixed(1)} h`;
  }

  class Timeline {
    constructor(root) {
      this.root = root;
      this.versions = "versions" in root.dataset;
      this.lane = LANE + (this.versions ? LABELS : 0);
      this.told = null;
      this.at = null; // [lane, stretch] under the pointer or chosen by keys
      this.build();
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    build() {
      this.names = element("div", { class: "timeline-names" });
      this.canvas = element("canvas", {
        tabindex: "0",
        role: "img",
        "aria-label": "Phase timeline. Left and right arrows go through the stretches, up and down through the jobs.",
      });
      this.plot = element("div", { class: "timeline-plot" }, this.canvas);
      this.line = element("p", { class: "timeline-line", role: "status" });
      this.table = element("tbody");
      const heads = ["Job", "Now", ...PHASES].map((name) => element("th", { scope: "col" }, name));
      const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.table);
      this.details = element(
        "details",
        { class: "timeline-table" },
        element("summary", {}, "As a table"),
        element("div", { class: "table-scroll", tabindex: "0" }, table),
      );
      this.empty = element(
        "p",
        { class: "timeline-empty" },
        "No job was at work in this time. Lanes appear as soon as one runs.",
      );
      this.body = element("div", { class: "timeline-body" }, this.names, this.plot);
      this.root.replaceChildren(this.body, this.empty, this.line, this.details);
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", () => this.choose(null));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("blur", () => this.choose(null));
    }

    async refresh() {
      const before = this.told;
      this.told = await marlaas.json(this.root.dataset.src);
      this.at = this.again(before);
      this.tell();
      this.draw();
    }

    /** What was chosen before, in what is told now. */
    again(before) {
      if (!this.at) return null;
      const lane = before.lanes[this.at[0]];
      const i = this.told.lanes.findIndex((one) => one.id === lane.id);
      const [phase, version, , start] = this.at[1];
      const began = before.start + start - this.told.start;
      const span = this.told.lanes[i]?.spans.find(
        (one) => one[0] === phase && one[1] === version && Math.abs(one[3] - Math.max(0, began)) < 1,
      );
      return span ? [i, span] : null;
    }

    /** Names, table and emptiness; only what changed is touched, so that focus stays. */
    tell() {
      const { lanes } = this.told;
      const empty = lanes.length === 0;
      this.empty.hidden = !empty;
      this.body.hidden = this.line.hidden = this.details.hidden = empty;
      const ids = lanes.map((lane) => lane.id).join();
      if (ids !== this.ids) {
        this.ids = ids;
        this.names.replaceChildren(
          ...lanes.map((lane) =>
            element(
              ...(lane.kind === "preflight" ? ["span", {}] : ["a", { href: `/console/jobs/${encodeURIComponent(lane.id)}` }]),
              lane.name,
              element("small", {}, owner(lane)),
            ),
          ),
        );
        lanes.forEach((lane, i) => (this.names.children[i].title = `${lane.name} of ${owner(lane)}`));
        this.names.classList.toggle("tall", this.versions);
      }
      if (this.details.open) this.fill();
      this.details.ontoggle = () => this.details.open && this.fill();
    }

    fill() {
      const length = this.told.end - this.told.start;
      const rows = this.told.lanes.map((lane) => {
        const sums = Object.fromEntries(PHASES.map((phase) => [phase, 0]));
        for (const [phase, , , start, end] of lane.spans) sums[phase] += end - start;
        const now = lane.spans.filter((span) => span[4] >= length - 0.5).map(([phase, version]) => `${phase} v${version}`);
        return element(
          "tr",
          {},
          element("th", { scope: "row" }, `${lane.name} (${owner(lane)})`),
          element("td", {}, now.join(", ") || lane.state),
          ...PHASES.map((phase) => element("td", {}, seconds(sums[phase]))),
        );
      });
      this.table.replaceChildren(...rows);
    }

    draw() {
      if (!this.told || !this.told.lanes.length) return;
      const { lanes } = this.told;
      const width = this.plot.clientWidth;
      const height = lanes.length * this.lane + AXIS;
      if (!width) return;
      const ratio = devicePixelRatio || 1;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
      const pen = this.canvas.getContext("2d");
      pen.scale(ratio, ratio);
      this.scale = width / (this.told.end - this.told.start);
      this.drawAxis(pen, width, height);
      const colours = Object.fromEntries(PHASES.map((phase) => [phase, css(`--phase-${phase}`)]));
      lanes.forEach((lane, i) => this.drawLane(pen, lane, i, colours));
      this.drawChoice(pen);
    }

    drawAxis(pen, width, height) {
      const length = this.told.end - this.told.start;
      const step = [10, 30, 60, 120, 300, 600, 1200, 1800, 3600].find((s) => length / s <= Math.max(3, width / 90)) ?? 7200;
      pen.strokeStyle = css("--line");
      pen.fillStyle = css("--text-muted");
      pen.font = `11px ${css("--pico-font-family-sans-serif")}`;
      pen.lineWidth = 1;
      for (let ago = 0; ago < length; ago += step) {
        const x = Math.round((length - ago) * this.scale) - 0.5;
        pen.beginPath();
        pen.moveTo(x, 0);
        pen.lineTo(x, height - AXIS + 4);
        pen.stroke();
        pen.textAlign = ago === 0 ? "right" : "center";
        pen.fillText(ago === 0 ? this.endLabel() : `−${seconds(ago).replace(".0", "")}`, ago === 0 ? width : x, height - 6);
      }
    }

    endLabel() {
      const late = Date.now() / 1000 - this.told.end;
      return late < 60 ? "now" : new Date(this.told.end * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    }

    /** Top and height of a stretch on the canvas. */
    place(i, phase) {
      const [from, share] = SHARE[phase];
      const top = i * this.lane + (this.versions ? LABELS : 0) + (LANE - BAR) / 2;
      return [top + BAR * from, BAR * share];
    }

    drawLane(pen, lane, i, colours) {
      for (const [phase, , , start, end] of lane.spans) {
        const [top, height] = this.place(i, phase);
        pen.fillStyle = colours[phase];
        pen.fillRect(start * this.scale, top, Math.max(1, (end - start) * this.scale), height);
      }
      if (this.versions) this.drawVersions(pen, lane, i);
    }

    drawVersions(pen, lane, i) {
      pen.fillStyle = css("--text-muted");
      pen.textAlign = "left";
      const starts = new Map();
      for (const [, version, kind, start] of lane.spans) {
        if (kind === "train" && !starts.has(version)) starts.set(version, start);
      }
      let free = 0;
      for (const [version, start] of starts) {
        const x = start * this.scale;
        if (x + 3 < free) continue;
        pen.fillRect(x, i * this.lane + 3, 1, this.lane - 8);
        const label = `v${version}`;
        pen.fillText(label, x + 4, i * this.lane + 12);
        free = x + pen.measureText(label).width + 12;
      }
    }

    drawChoice(pen) {
      if (!this.at) return;
      const [i, span] = this.at;
      const [top, height] = this.place(i, span[0]);
      pen.strokeStyle = css("--text");
      pen.lineWidth = 2;
      pen.strokeRect(span[3] * this.scale, top - 1, Math.max(2, (span[4] - span[3]) * this.scale), height + 2);
    }

    point(event) {
      if (!this.told) return;
      const box = this.canvas.getBoundingClientRect();
      const i = Math.floor((event.clientY - box.top) / this.lane);
      const lane = this.told.lanes[i];
      const t = (event.clientX - box.left) / this.scale;
      const near = 3 / this.scale;
      const y = event.clientY - box.top;
      const under = (lane?.spans ?? []).filter((span) => t >= span[3] - near && t <= span[4] + near);
      const hit = under.find((span) => {
        const [top, height] = this.place(i, span[0]);
        return y >= top && y <= top + height;
      });
      this.choose(hit || under[0] ? [i, hit ?? under[0]] : null);
    }

    key(event) {
      const lanes = this.told?.lanes ?? [];
      if (!lanes.length || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Escape"].includes(event.key)) return;
      event.preventDefault();
      if (event.key === "Escape") {
        this.choose(null);
        return;
      }
      let [i, span] = this.at ?? [0, null];
      if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        i = Math.min(lanes.length - 1, Math.max(0, i + (event.key === "ArrowUp" ? -1 : 1)));
        const wanted = span?.[3] ?? Infinity;
        span = lanes[i].spans.findLast((one) => one[3] <= wanted) ?? lanes[i].spans[0];
      } else {
        const spans = lanes[i].spans;
        const here = span ? spans.findIndex((one) => one[0] === span[0] && one[3] === span[3]) : spans.length;
        span = spans[Math.min(spans.length - 1, Math.max(0, here + (event.key === "ArrowLeft" ? -1 : 1)))];
      }
      this.choose(span ? [i, span] : null);
    }

    choose(at) {
      this.at = at;
      this.line.textContent = "";
      if (at) {
        const lane = this.told.lanes[at[0]];
        const [phase, version, kind, start, end] = at[1];
        const ago = this.told.end - this.told.start - start;
        const evaluation = kind === "train" ? "" : ` (${kind})`;
        const what = `${phase}${evaluation} at version ${version} for ${seconds(end - start)}`;
        this.line.textContent = `${lane.name} of ${lane.tenant}: ${what}, begun ${seconds(ago)} ${this.endLabel() === "now" ? "ago" : "before the end"}`;
      }
      this.draw();
    }
  }

  function start(root) {
    const timeline = new Timeline(root);
    marlaas.onTheme(() => timeline.draw());
    root.addEventListener("timeline:refresh", () => timeline.refresh());
    if ("once" in root.dataset) {
      timeline.refresh();
      return;
    }
    const stop = marlaas.poll(root, async () => {
      await timeline.refresh();
      if (timeline.versions && timeline.told.lanes.every((lane) => OVER.includes(lane.state))) stop();
    });
  }

  document.querySelectorAll("[data-timeline]").forEach(start);

  // <select data-timeline-minutes="id of a timeline">
  for (const select of document.querySelectorAll("[data-timeline-minutes]")) {
    select.addEventListener("change", () => {
      const root = document.getElementById(select.dataset.timelineMinutes);
      const url = new URL(root.dataset.src, location.href);
      url.searchParams.set("minutes", select.value);
      root.dataset.src = url.pathname + url.search;
      root.dispatchEvent(new CustomEvent("timeline:refresh"));
    });
  }
})();
