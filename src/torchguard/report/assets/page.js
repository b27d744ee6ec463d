"use strict";
// The page works without this script: it adds charts, filters, sorting, pages of long tables and linked listings.
// All text goes into the page by textContent, never as HTML.
(() => {
  const root = document.body;
  const style = name => getComputedStyle(root).getPropertyValue(name).trim();
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const dataOf = holder => JSON.parse(holder.querySelector(":scope > script.data").textContent);
  const charts = [], printers = [];  // functions that draw a chart; what to do before and after printing

  // Theme: as the system says, or as the reader chooses.
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const setTheme = theme => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    charts.forEach(draw => draw());
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(root.dataset.theme || "auto"));

  // A link to a collapsed section opens it, and those around it.
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView();
    const focused = target.querySelector("h1, h2, h3, h4, h5, h6, summary");
    if (focused) focused.focus({ preventScroll: true });
  };
  addEventListener("hashchange", reveal);

  // The link of the section in view.
  const links = [...document.querySelectorAll("nav a")];
  const byId = new Map(links.map(link => [link.hash.slice(1), link]));
  const spy = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      links.forEach(link => link.removeAttribute("aria-current"));
      byId.get(entry.target.id).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  byId.forEach((_, id) => { const at = document.getElementById(id); if (at) spy.observe(at); });

  // Long tables: a filter over all cells, sorting by a column, pages.
  const PAGE = 50, PRINTED = 500;
  const startTable = holder => {
    const data = dataOf(holder), body = holder.querySelector("tbody"), heads = [...holder.querySelectorAll("th")];
    const tools = holder.querySelector(".tools"), input = tools.querySelector("input"), count = tools.querySelector(".count");
    const [previous, next] = tools.querySelectorAll("button"), more = holder.querySelector(":scope > .more");
    const numeric = heads.map(head => head.classList.contains("number"));
    const search = data.rows.map(row => row.join("\n").toLowerCase());
    let shown = data.rows.map((_, i) => i), page = 0, size = PAGE;
    const draw = () => {
      const rows = shown.slice(page * size, (page + 1) * size).map(i => {
        const row = element("tr");
        data.rows[i].forEach((text, j) => {
          const cell = element("td", undefined, numeric[j] ? "number" : text.length <= 24 ? "short" : "");
          if (j === 0 && data.links[i]) {
            const link = element("a", text);
            link.href = "#" + data.links[i];
            cell.append(link);
          } else cell.textContent = text;
          row.append(cell);
        });
        return row;
      });
      body.replaceChildren(...rows);
      const last = Math.max(1, Math.ceil(shown.length / size));
      count.textContent = `${shown.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")} rows` +
        (last > 1 ? `, page ${page + 1} of ${last}` : "");
      previous.disabled = page === 0;
      next.disabled = page >= last - 1;
    };
    const filter = () => {
      const wanted = input.value.toLowerCase();
      shown = [];
      for (let i = 0; i < search.length; i++) if (search[i].includes(wanted)) shown.push(i);
      page = 0;
      sort();
      draw();
    };
    let by = -1, descending = false;
    const sort = () => {
      if (by < 0) return;
      const key = i => { const raw = data.raw[by] && data.raw[by][i]; return typeof raw === "number" ? raw : data.rows[i][by]; };
      shown.sort((a, b) => {
        const x = key(a), y = key(b);
        const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
        return descending ? -order : order;
      });
    };
    heads.forEach((head, j) => {
      const sorter = element("button", head.textContent);
      sorter.type = "button";
      head.replaceChildren(sorter);
      sorter.addEventListener("click", () => {
        descending = by === j && !descending;
        by = j;
        heads.forEach(one => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort();
        page = 0;
        draw();
      });
    });
    input.addEventListener("input", filter);
    previous.addEventListener("click", () => { page--; draw(); });
    next.addEventListener("click", () => { page++; draw(); });
    tools.hidden = false;
    const sayLeftOut = (rows, why) => {
      more.hidden = rows <= 0;
      more.textContent = `… and ${rows.toLocaleString("en")} more rows, which ${why}.`;
    };
    const restore = () => {
      [page, size] = [0, PAGE];
      sayLeftOut(data.total - data.rows.length, "are not in this page");
      draw();
    };
    const print = () => {
      [page, size] = [0, PRINTED];
      sayLeftOut(data.total - Math.min(shown.length, PRINTED), "are not printed");
      draw();
    };
    printers.push({ print, restore });
    restore();
    holder.dataset.ready = "true";
  };

  // Listings: lines with the same key belong together.
  document.querySelectorAll(".code").forEach(code => {
    const same = new Map();
    code.querySelectorAll("li[data-key]").forEach(line => {
      if (!same.has(line.dataset.key)) same.set(line.dataset.key, []);
      same.get(line.dataset.key).push(line);
      line.tabIndex = -1;
    });
    const mark = key => {
      code.querySelectorAll("li.same").forEach(line => line.classList.remove("same"));
      (same.get(key) || []).forEach(line => line.classList.add("same"));
    };
    const follow = line => {
      const from = line.closest(".pane");
      code.querySelectorAll(".pane").forEach(pane => {
        const first = pane !== from && (same.get(line.dataset.key) || []).find(one => pane.contains(one));
        const box = pane.querySelector(".scroll");
        if (first) box.scrollTop += first.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 3;
      });
    };
    const lineOf = event => event.target.closest("li[data-key]");
    code.addEventListener("mouseover", event => { const line = lineOf(event); if (line) mark(line.dataset.key); });
    code.addEventListener("focusin", event => { const line = lineOf(event); if (line) mark(line.dataset.key); });
    code.addEventListener("click", event => { const line = lineOf(event); if (line) { mark(line.dataset.key); follow(line); } });
    code.addEventListener("keydown", event => {
      const box = event.target.closest(".scroll");
      if (!box) return;
      const lines = [...box.querySelectorAll("li[data-key]")], at = lines.indexOf(document.activeElement);
      const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
      if (event.key === "Enter" && at >= 0) follow(lines[at]);
      else if (to !== undefined && lines[to]) { lines[to].focus(); event.preventDefault(); }
    });
  });

  // Charts.
  const PAPER = 720;  // the width of a page in CSS pixels, without its margins
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  const format = (value, unit) => {
    if (value === null || value === undefined) return "";
    if (unit === "bytes") {
      let i = 0;
      while (Math.abs(value) >= 1024 && i < UNITS.length - 1) { value /= 1024; i++; }
      return `${i ? value.toFixed(1) : value} ${UNITS[i]}`;
    }
    const text = Math.abs(value) >= 1e15 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toPrecision(3) : value.toLocaleString("en", { maximumSignificantDigits: 6 });
    return unit ? `${text} ${unit}` : text;
  };
  const short = (text, length) => text.length <= length ? text : "…" + text.slice(1 - length);
  const tip = (title, lines) => {
    const made = element("div", undefined, "tip");
    made.append(element("b", title), ...lines.filter(Boolean).map(line => element("div", line)));
    return made;
  };
  const tooltip = formatter => ({
    formatter, confine: true, transitionDuration: 0, backgroundColor: style("--raised"), borderColor: style("--line"),
    textStyle: { color: style("--ink") },
  });
  const axis = (name, more) => ({
    name, nameLocation: "middle", nameGap: 28, nameTextStyle: { color: style("--soft") },
    axisLabel: { color: style("--soft"), hideOverlap: true }, axisLine: { lineStyle: { color: style("--line") } },
    splitLine: { lineStyle: { color: style("--line") } }, ...more,
  });
  const colour = status => style(`--${status}`);
  const palette = () => [style("--accent"), style("--bad"), style("--ok"), style("--unknown"), style("--warning")];
  const base = () => ({ animation: false, color: palette(), textStyle: { fontFamily: "inherit" }, aria: { enabled: false } });

  // Each returns { option(), items, describe(i), move(i, key) }: `items` are what the arrow keys go through.
  const kinds = {
    line(data) {
      const describe = i => `${data.x_label} ${data.x[i]}${data.names.length ? `, ${data.names[i]}` : ""}: ` +
        data.series.map(one => `${one.name} ${format(one.values[i], data.unit)}`).join(", ");
      return {
        items: data.x.length, describe,
        option: () => ({
          ...base(),
          grid: { left: 76, right: 24, top: data.series.length > 1 ? 36 : 16, bottom: data.x.length > 60 ? 78 : 44 },
          legend: data.series.length > 1 ? { top: 0, textStyle: { color: style("--ink") } } : undefined,
          tooltip: { trigger: "axis", ...tooltip(found => tip(
            `${data.x_label} ${data.x[found[0].dataIndex]}${data.names.length ? `: ${data.names[found[0].dataIndex]}` : ""}`,
            found.map(one => `${data.series[one.seriesIndex].name}: ${format(data.series[one.seriesIndex].values[one.dataIndex], data.unit)}`),
          )) },
          // Not a category axis: that would measure the labels of thousands of steps.
          xAxis: axis(data.x_label, { type: "value", min: "dataMin", max: "dataMax", minInterval: data.x.every(Number.isInteger) ? 1 : 0, splitLine: { show: false } }),
          yAxis: axis(data.y_label, { type: "value", nameGap: 60, min: 0,
            minInterval: data.series.every(one => one.values.every(value => value === null || Number.isInteger(value))) ? 1 : 0,
            axisLabel: { color: style("--soft"), formatter: value => format(value, data.unit) } }),
          dataZoom: data.x.length > 60 ? [{ type: "slider", height: 18, bottom: 8 }] : [],
          series: data.series.map((one, i) => ({
            type: "line", name: one.name, data: one.values.map((value, k) => [data.x[k], value]), showSymbol: one.values.length < 40, step: data.unit === "bytes" ? "middle" : false,
            sampling: "max", areaStyle: data.series.length === 1 ? { opacity: .15 } : undefined,
            markLine: i || !data.limits.length ? undefined : {
              silent: true, symbol: "none", lineStyle: { color: style("--bad"), type: "dashed" },
              label: { formatter: found => data.limits[found.dataIndex][0], color: style("--bad"), position: "insideEndTop" },
              data: data.limits.map(([, at]) => ({ yAxis: at })),
            },
          })),
        }),
      };
    },

    timeline(data) {
      const lanes = [...new Set(data.spans.map(one => one.lane))];
      const describe = i => {
        const one = data.spans[i];
        return `${one.label}, ${one.lane}, at ${one.start.toFixed(2)} s${one.seconds ? `, took ${one.seconds.toFixed(2)} s` : ""}. ${one.details.join(". ")}`;
      };
      return {
        items: data.spans.length, describe, height: Math.max(160, 70 + 42 * lanes.length),
        option: () => ({
          ...base(),
          grid: { left: 150, right: 24, top: 10, bottom: 48 },
          tooltip: tooltip(found => { const one = data.spans[found.dataIndex];
            return tip(one.label, [`at ${one.start.toFixed(2)} s${one.seconds ? `, took ${one.seconds.toFixed(2)} s` : ""}`, ...one.details.slice(0, 8)]); }),
          xAxis: axis("seconds", { type: "value", min: 0 }),
          yAxis: axis("", { type: "category", data: lanes, inverse: true, axisLabel: { color: style("--ink"), width: 138, overflow: "truncate" } }),
          series: [{
            type: "custom",
            data: data.spans.map(one => [lanes.indexOf(one.lane), one.start, one.start + one.seconds]),
            encode: { x: [1, 2], y: 0 },
            renderItem: (params, api) => {
              const [x, y] = api.coord([api.value(1), api.value(0)]), [end] = api.coord([api.value(2), api.value(0)]);
              const height = Math.min(22, api.size([0, 1])[1] * .6), status = data.spans[params.dataIndex].status;
              const fill = colour(status === "ok" ? "accent" : status);
              if (!data.spans[params.dataIndex].seconds) {
                return { type: "path", shape: { pathData: "M0 -8 L8 0 L0 8 L-8 0 Z", x: -8, y: -8, width: 16, height: 16 }, x, y, style: { fill } };
              }
              return { type: "rect", shape: { x, y: y - height / 2, width: Math.max(3, end - x), height, r: 3 }, style: { fill, opacity: .85 } };
            },
          }],
        }),
      };
    },

    flame(data) {
      const frames = [];
      const add = (frame, depth, start) => {
        frames.push({ frame, depth, start });
        let at = start;
        [...frame.children].sort((a, b) => b.value - a.value).forEach(child => { add(child, depth + 1, at); at += child.value; });
      };
      add(data.root, 0, 0);
      const depth = Math.max(...frames.map(one => one.depth)) + 1, total = data.root.value || 1;
      const describe = i => `${frames[i].frame.name}: ${format(frames[i].frame.value, data.unit)}, ${(100 * frames[i].frame.value / total).toFixed(1)} %`;
      return {
        items: frames.length, describe, height: Math.max(120, 44 + 26 * depth),
        option: () => ({
          ...base(),
          grid: { left: 8, right: 8, top: 6, bottom: 30 },
          tooltip: tooltip(found => tip(frames[found.dataIndex].frame.name, [describe(found.dataIndex).split(": ").pop()])),
          xAxis: axis("", { type: "value", min: 0, max: total, axisLabel: { color: style("--soft"), showMaxLabel: false, formatter: value => format(value, data.unit) } }),
          yAxis: { show: false, type: "value", min: 0, max: depth, inverse: true },
          series: [{
            type: "custom",
            data: frames.map(one => [one.start, one.depth, one.frame.value]),
            renderItem: (params, api) => {
              const one = frames[params.dataIndex];
              const [x, y] = api.coord([one.start, one.depth]), [width, height] = api.size([one.frame.value, 1]);
              if (width < .5) return;
              const warm = 30 - 26 * one.frame.value / total;
              return {
                type: "rect", shape: { x, y, width: Math.max(.5, width - 1), height: height - 2, r: 2 },
                style: { fill: `hsl(${warm} 75% 62%)` },
                textContent: width > 40 ? { style: { text: short(one.frame.name, Math.floor(width / 7)), fill: "#1b1f24", fontSize: 12 } } : undefined,
                textConfig: { position: "insideLeft" },
              };
            },
          }],
        }),
      };
    },

    roofline(data) {
      const ridge = data.peak_flops / data.bandwidth;
      const points = data.points.filter(one => one.flops > 0 && one.bytes > 0).map(one => {
        const intensity = one.flops / one.bytes;
        return { ...one, intensity, rate: Math.min(data.peak_flops, intensity * data.bandwidth), seconds: Math.max(one.flops / data.peak_flops, one.bytes / data.bandwidth) };
      });
      const low = Math.min(ridge / 100, ...points.map(one => one.intensity / 2)), high = Math.max(ridge * 100, ...points.map(one => one.intensity * 2));
      const longest = Math.max(...points.map(one => one.seconds), 1e-30);
      const describe = i => `${points[i].name}: ${format(points[i].intensity)} FLOP a byte, at most ${format(points[i].rate / 1e9)} GFLOP/s, at least ${format(points[i].seconds * 1e6)} us, limited by ${points[i].intensity > ridge ? "compute" : "bandwidth"}`;
      return {
        items: points.length, describe, series: 1,
        option: () => ({
          ...base(),
          grid: { left: 76, right: 24, top: 16, bottom: 44 },
          tooltip: tooltip(found => found.seriesIndex ? tip(points[found.dataIndex].name, [describe(found.dataIndex).split(": ").slice(1).join(": "), points[found.dataIndex].where]) : undefined),
          xAxis: axis("FLOP a byte", { type: "log", min: low, max: high, axisLabel: { color: style("--soft"), hideOverlap: true, formatter: value => value.toPrecision(2) } }),
          yAxis: axis("GFLOP/s at most", { type: "log", nameGap: 56, axisLabel: { color: style("--soft"), formatter: value => format(value / 1e9) } }),
          series: [
            { type: "line", silent: true, showSymbol: false, lineStyle: { color: style("--soft") }, data: [[low, low * data.bandwidth], [ridge, data.peak_flops], [high, data.peak_flops]] },
            { type: "scatter", data: points.map(one => ({ value: [one.intensity, one.rate], symbolSize: 8 + 22 * Math.sqrt(one.seconds / longest), itemStyle: { opacity: .75, color: one.intensity > ridge ? style("--accent") : style("--warning") } })) },
          ],
        }),
      };
    },

    heatmap(data, figure) {
      const decode = ({ bits, data }) => {
        const text = atob(data), bytes = new Uint8Array(text.length);
        for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
        return new { 8: Uint8Array, 16: Uint16Array, 32: Uint32Array }[bits](bytes.buffer);
      };
      const starts = decode(data.starts), at = decode(data.at), values = decode(data.values);
      const names = data.rows.map(name => name.toLowerCase());
      const tools = figure.querySelector(".tools"), filter = tools.querySelector(".filter"), count = tools.querySelector(".count");
      const from = tools.querySelector(".from"), to = tools.querySelector(".to"), [previous, next] = tools.querySelectorAll("button");
      const ROWS = 40, BINS = 200;
      let matched = names.map((_, i) => i), page = 0, rows = [], cells = [], bins = 0, wide = 1, first = 0, most = 1;
      const clamp = value => Math.min(data.columns - 1, Math.max(data.first, Math.floor(Number(value) || 0)));
      const compute = () => {
        first = Math.min(clamp(from.value), clamp(to.value));
        const last = Math.max(clamp(from.value), clamp(to.value));
        wide = Math.max(data.join, Math.ceil((last - first + 1) / BINS / data.join) * data.join);
        bins = Math.ceil((last - first + 1) / wide);
        rows = matched.slice(page * ROWS, (page + 1) * ROWS);
        cells = [];
        most = 1;
        rows.forEach((row, y) => {
          const sums = new Float64Array(bins);
          for (let i = starts[row]; i < starts[row + 1]; i++) {
            const column = at[i] * data.join;
            if (column + data.join > first && column <= last) sums[Math.max(0, Math.floor((column - first) / wide))] += values[i];
          }
          sums.forEach((sum, x) => { if (sum) { cells.push([x, y, sum]); most = Math.max(most, sum); } });
        });
      };
      const columnsOf = x => {
        const low = first + x * wide, high = Math.min(low + wide - 1, data.columns - 1);
        return low === high ? `${data.column_label} ${low}` : `${data.column_label}s ${low} to ${high}`;
      };
      const describe = i => `${data.rows[rows[cells[i][1]]]}, ${columnsOf(cells[i][0])}: ${format(cells[i][2])} ${data.noun}`;
      const chart = {
        describe, height: 0,
        get items() { return cells.length; },
        option: () => {
          compute();
          chart.height = 96 + 18 * Math.max(3, rows.length);
          const last = Math.max(1, Math.ceil(matched.length / ROWS));
          count.textContent = `${matched.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")} rows` + (last > 1 ? `, page ${page + 1} of ${last}` : "");
          previous.disabled = page === 0;
          next.disabled = page >= last - 1;
          return {
            ...base(),
            grid: { left: Math.min(280, figure.clientWidth / 3), right: 24, top: 8, bottom: 88 },
            tooltip: tooltip(found => { const one = cells[found.dataIndex]; return tip(data.rows[rows[one[1]]], [columnsOf(one[0]), `${format(one[2])} ${data.noun}`]); }),
            xAxis: axis(data.column_label, { type: "category", data: Array.from({ length: bins }, (_, x) => first + x * wide), splitLine: { show: false },
              axisLabel: { color: style("--soft"), hideOverlap: true, interval: Math.ceil(bins / 12) - 1 } }),
            yAxis: axis("", { type: "category", inverse: true, data: rows.map(row => short(data.rows[row], 44)), axisLabel: { color: style("--ink"), interval: 0, fontSize: 11.5, width: Math.min(270, figure.clientWidth / 3 - 10), overflow: "truncate" } }),
            visualMap: { min: 0, max: most, orient: "horizontal", left: "center", bottom: 0, itemHeight: 120, itemWidth: 12, text: [format(most), "0"], textStyle: { color: style("--soft") }, inRange: { color: [style("--warning-ground"), style("--warning"), style("--bad")] } },
            series: [{ type: "heatmap", data: cells, progressive: 0, itemStyle: { borderWidth: bins > 100 ? 0 : 1, borderColor: style("--ground") }, emphasis: { itemStyle: { borderColor: style("--ink"), borderWidth: 1 } } }],
          };
        },
      };
      const redraw = () => figure.dispatchEvent(new Event("redraw"));
      filter.addEventListener("input", () => {
        const wanted = filter.value.toLowerCase();
        matched = [];
        names.forEach((name, i) => { if (name.includes(wanted)) matched.push(i); });
        page = 0;
        redraw();
      });
      [from, to].forEach(one => one.addEventListener("change", redraw));
      previous.addEventListener("click", () => { page--; redraw(); });
      next.addEventListener("click", () => { page++; redraw(); });
      tools.hidden = false;
      return chart;
    },
  };

  const startChart = figure => {
    const canvas = figure.querySelector(".canvas"), spoken = figure.querySelector(".spoken");
    const chart = kinds[figure.dataset.kind](dataOf(figure), figure);
    let drawn = null, at = -1;
    // A range that was chosen stays, also on paper, which has no slider.
    const keepRange = (option, printing) => {
      const chosen = drawn ? drawn.getOption().dataZoom || [] : [];
      (option.dataZoom || []).forEach((one, i) => {
        if (chosen[i]) Object.assign(one, { start: chosen[i].start, end: chosen[i].end });
        if (printing) Object.assign(one, { show: false });
      });
      if (printing && option.dataZoom && option.dataZoom.length) option.grid.bottom = 44;
    };
    const draw = (printing = false) => {
      const option = chart.option();
      keepRange(option, printing);
      if (chart.height) canvas.style.height = `${chart.height}px`;
      if (drawn) drawn.resize(); else drawn = echarts.init(canvas, null, { renderer: "canvas" });
      drawn.setOption(option, { notMerge: true });
      at = -1;
    };
    figure.addEventListener("redraw", () => draw());
    new ResizeObserver(() => {  // told also when it begins to observe: drawing a large chart twice takes long
      if (drawn.getWidth() !== canvas.clientWidth || drawn.getHeight() !== canvas.clientHeight) drawn.resize();
    }).observe(canvas);
    canvas.addEventListener("keydown", event => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 25, PageUp: -25 }[event.key];
      if (event.key === "Escape") return void drawn.dispatchAction({ type: "hideTip" });
      if (!chart.items || (by === undefined && event.key !== "Home" && event.key !== "End")) return;
      event.preventDefault();
      at = event.key === "Home" ? 0 : event.key === "End" ? chart.items - 1 : Math.min(chart.items - 1, Math.max(0, at + by));
      drawn.dispatchAction({ type: "showTip", seriesIndex: chart.series || 0, dataIndex: at });
      spoken.textContent = chart.describe(at);
    });
    canvas.addEventListener("blur", () => drawn && drawn.dispatchAction({ type: "hideTip" }));
    draw();
    // Chromium prints only the top one of several canvases that lie upon each other: a chart is printed as one image.
    let printed = null;
    const print = () => {
      draw(true);
      drawn.resize({ width: PAPER, height: canvas.clientHeight });
      printed = drawn.renderToCanvas({ pixelRatio: 2, backgroundColor: style("--ground") });
      printed.className = "printed";
      printed.removeAttribute("style");
      canvas.after(printed);
      figure.classList.add("printing");
    };
    const restore = () => {
      if (printed) printed.remove();
      figure.classList.remove("printing");
    };
    charts.push(() => draw());
    printers.push({ print, restore });
  };
  // A chart or a long table is started when it comes near the view; all that is visible is before the page is printed.
  const waiting = new Set(document.querySelectorAll("figure.chart, .table.long"));
  const begin = one => { if (waiting.delete(one)) (one.matches(".chart") ? startChart : startTable)(one); };
  const near = new IntersectionObserver(entries => {
    entries.filter(entry => entry.isIntersecting).forEach(entry => { near.unobserve(entry.target); begin(entry.target); });
  }, { rootMargin: "300px" });
  waiting.forEach(one => near.observe(one));
  let opened = [], chosen;
  addEventListener("beforeprint", () => {
    // Listings are long: those are printed that the reader has opened.
    opened = [...document.querySelectorAll("details.section:not([open])")].filter(one => !one.querySelector(".code"));
    opened.forEach(one => { one.open = true; });
    chosen = root.dataset.theme;
    root.dataset.theme = "light";
    [...waiting].filter(one => !one.closest("details:not([open])")).forEach(begin);
    printers.forEach(one => one.print());
  });
  addEventListener("afterprint", () => {
    opened.forEach(one => { one.open = false; });
    printers.forEach(one => one.restore());
    setTheme(chosen || "auto");
  });
  reveal();
  root.dataset.ready = "true";
})();
