/* Charts of jobs' metrics by version, drawn by uPlot, growing as versions are committed.
 *
 * <section data-charts data-src="/console/data/series?job=…"> holds <figure data-metric="loss"> with an element
 * [data-plot] to draw in and, optionally, [data-latest] for the newest value. Figures marked [data-optional] are hidden
 * while no update has measured their metric. With several jobs each chart has a line a job; with one job the reward
 * shows its spread and the evaluations. [data-palette] swatches get the colour of their job.
 */
"use strict";

(() => {
  const COLOURS = 8; // --chart-1 … --chart-8
  const HEIGHT = 170;

  const css = marlaas.color;
  const colour = (i) => css(`--chart-${(i % COLOURS) + 1}`);
  const faint = (hex) => `${hex}30`; // the chart colours are written as #rrggbb

  function figures(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 10000 || size < 0.001) return value.toExponential(1);
    return String(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
  }

  /** Evaluations known so far and those told now: these may be of earlier versions. */
  function merged(known, told) {
    if (!known || !told.versions.length) return known ?? told;
    const place = new Map(known.versions.map((version, i) => [version, [known, i]]));
    told.versions.forEach((version, i) => place.set(version, [told, i]));
    const versions = [...place.keys()].sort((a, b) => a - b);
    const along = (name) => versions.map((version) => place.get(version)[0][name][place.get(version)[1]]);
    return { versions, reward_mean: along("reward_mean"), pass_rate: along("pass_rate") };
  }

  /** What the server has told of one job so far. */
  class Curves {
    constructor(told) {
      Object.assign(this, { id: told.id, name: told.name, tenant: told.tenant, versions: [], metrics: {} });
      for (const name of Object.keys(told.metrics)) this.metrics[name] = [];
      this.add(told);
    }

    /** Takes in versions newer than the last one known; returns whether anything changed. */
    add(told) {
      const last = this.versions.at(-1) ?? 0;
      const known = JSON.stringify(this.evals ?? null);
      const from = told.versions.findIndex((version) => version > last);
      if (from >= 0) {
        this.versions.push(...told.versions.slice(from));
        for (const [name, values] of Object.entries(told.metrics)) this.metrics[name].push(...values.slice(from));
      }
      this.over = told.over;
      this.evals = merged(this.evals, told.evals);
      return from >= 0 || known !== JSON.stringify(this.evals);
    }
  }

  class Charts {
    constructor(root) {
      this.root = root;
      this.source = new URL(root.dataset.src, location.href);
      this.jobs = new Map();
      this.plots = new Map();
      this.figures = [...root.querySelectorAll("[data-metric]")];
      this.resized = new ResizeObserver(() => this.resize());
      this.resized.observe(root);
    }

    get over() {
      return this.jobs.size > 0 && [...this.jobs.values()].every((job) => job.over);
    }

    async refresh() {
      const url = new URL(this.source);
      const live = [...this.jobs.values()].filter((job) => !job.over);
      if (this.jobs.size) {
        url.searchParams.delete("job");
        for (const job of live) url.searchParams.append("job", job.id);
        url.searchParams.set("after", Math.min(...live.map((job) => job.versions.at(-1) ?? 0)));
      }
      const told = (await marlaas.json(url)).jobs;
      let changed = this.jobs.size === 0;
      for (const one of told) {
        const known = this.jobs.get(one.id);
        if (known) changed = known.add(one) || changed;
        else this.jobs.set(one.id, new Curves(one));
      }
      if (changed) this.draw();
    }

    draw() {
      const jobs = [...this.jobs.values()];
      jobs.forEach((job, i) => {
        for (const swatch of document.querySelectorAll(`[data-palette="${CSS.escape(job.id)}"]`)) {
          swatch.style.backgroundColor = colour(i);
        }
      });
      const none = jobs.every((job) => job.versions.length === 0 && job.evals.versions.length === 0);
      this.root.classList.toggle("charts-empty", none);
      for (const figure of this.figures) this.drawOne(figure, jobs);
    }

    drawOne(figure, jobs) {
      const name = figure.dataset.metric;
      const measured = jobs.some((job) => (job.metrics[name] ?? []).some((value) => value !== null));
      figure.hidden = !measured && "optional" in figure.dataset && jobs.some((job) => job.versions.length > 0);
      if (figure.hidden) return;
      const { data, series, bands } = jobs.length === 1 ? single(name, jobs[0]) : several(name, jobs);
      this.tellLatest(figure, name, jobs);
      const shape = series.map((one) => one.label + one.stroke).join("|");
      const known = this.plots.get(figure);
      if (known && known.shape === shape) {
        known.plot.setData(data);
        return;
      }
      if (known) known.plot.destroy();
      const target = figure.querySelector("[data-plot]");
      const shown = options(target, series, bands, this.root.id);
      if (series.length === 1 && jobs.length === 1) {
        shown.legend = { show: false };
        shown.hooks = { setCursor: [(plot) => this.tellLatest(figure, name, jobs, plot.cursor.idx ?? null)] };
      }
      const plot = new uPlot(shown, data, target);
      this.plots.set(figure, { plot, shape });
    }

    /** The newest value of a single job, or the one under the pointer with its version. */
    tellLatest(figure, name, jobs, index = null) {
      if (jobs.length !== 1) return;
      const target = figure.querySelector("[data-latest]");
      const values = jobs[0].metrics[name];
      target.textContent = figures(index === null ? values.findLast((value) => value !== null) : values[index]);
      if (index !== null) {
        const at = document.createElement("small");
        at.textContent = ` at v${jobs[0].versions[index]}`;
        target.append(at);
      }
    }

    /** Anew, in the colours of the theme that is on now. */
    repaint() {
      for (const { plot } of this.plots.values()) plot.destroy();
      this.plots.clear();
      this.draw();
    }

    resize() {
      for (const { plot } of this.plots.values()) {
        const width = plot.root.parentElement.clientWidth;
        if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
      }
    }
  }

  const line = (label, stroke, more = {}) => ({
    label,
    stroke,
    width: 2,
    spanGaps: true,
    value: (_, value) => figures(value),
    points: { size: 5, fill: stroke },
    ...more,
  });

  function single(name, job) {
    if (name !== "reward_mean") {
      return { data: [job.versions, job.metrics[name]], series: [line("value", colour(0))], bands: [] };
    }
    const versions = [...new Set([...job.versions, ...job.evals.versions])].sort((a, b) => a - b);
    const at = new Map(job.versions.map((version, i) => [version, i]));
    const means = versions.map((v) => (at.has(v) ? job.metrics.reward_mean[at.get(v)] : null));
    const spreads = versions.map((v) => (at.has(v) ? job.metrics.reward_std[at.get(v)] : null));
    const offset = (sign) => means.map((m, i) => (m === null || spreads[i] === null ? null : m + sign * spreads[i]));
    const evals = new Map(job.evals.versions.map((version, i) => [version, job.evals.reward_mean[i]]));
    const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    const data = [versions, means, offset(1), offset(-1)];
    const series = [
      line("reward", colour(0)),
      { ...edge, label: "+ std", value: (_, value) => figures(value) },
      { ...edge, label: "− std", value: (_, value) => figures(value) },
    ];
    if (evals.size) {
      data.push(versions.map((v) => evals.get(v) ?? null));
      const held = colour(1);
      series.push(line("held-out", held, { width: 1, dash: [4, 4], points: { show: true, size: 8, fill: held } }));
    }
    return { data, series, bands: [{ series: [2, 3], fill: faint(colour(0)) }] };
  }

  /** The job's name, with the start of its id where another one is called the same. */
  const told = (job, jobs) =>
    jobs.some((other) => other !== job && other.name === job.name) ? `${job.name} ${job.id.slice(0, 8)}` : job.name;

  function several(name, jobs) {
    const tables = jobs.map((job) => [job.versions, job.metrics[name] ?? job.versions.map(() => null)]);
    const filled = tables.map(([x, y]) => (x.length ? [x, y] : [[0], [null]]));
    return { data: uPlot.join(filled), series: jobs.map((job, i) => line(told(job, jobs), colour(i))), bands: [] };
  }

  /** A flat line gets an axis of its own size; uPlot would draw a zero on one from 0 to 100. */
  function height(_, low, high) {
    if (low === null) return [0, 1];
    if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
    return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  }

  function options(target, series, bands, key) {
    const axis = {
      stroke: css("--text-muted"),
      grid: { stroke: css("--line"), width: 1 },
      ticks: { show: false },
      font: `11px ${css("--pico-font-family-sans-serif")}`,
    };
    return {
      width: target.clientWidth || 320,
      height: HEIGHT,
      scales: { x: { time: false }, y: { range: height } },
      cursor: { sync: { key }, points: { size: 7 }, drag: { x: true, y: false } },
      legend: { live: true },
      axes: [
        { ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000] },
        { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => figures(tick)) },
      ],
      series: [{ label: "version", value: (_, value) => (value === null ? "–" : String(value)) }, ...series],
      bands,
    };
  }

  function start(root) {
    const charts = new Charts(root);
    marlaas.onTheme(() => charts.repaint());
    const stop = marlaas.poll(root, async () => {
      await charts.refresh();
      if (charts.over) stop();
    });
  }

  document.querySelectorAll("[data-charts]").forEach(start);
})();
