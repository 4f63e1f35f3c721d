// Draws each timeline of DATA on a canvas: rows of spans, the memory curve below; zooms around the pointer.
const ROW = 34, LABEL = 90, MEMORY = 150, AXIS = 22;
const tip = Object.assign(document.createElement("div"), { id: "tip" });
document.body.append(tip);

const legend = document.getElementById("legend");
const key = (name, colour) => {
  const span = document.createElement("span"), dot = document.createElement("i");
  dot.style.background = colour;
  span.append(dot, name);
  legend.append(span);
};
Object.entries(DATA.colours).forEach(([name, colour]) => key(name, colour));
DATA.uses.forEach((use) => key("memory: " + use.name, use.colour));

const ms = (ns) => (ns / 1e6).toFixed(3) + " ms";
const size = (bytes) =>
  bytes >= 2 ** 30 ? (bytes / 2 ** 30).toFixed(2) + " GiB" : (bytes / 2 ** 20).toFixed(2) + " MiB";

function chart(timeline) {
  const title = document.createElement("h2");
  const share = timeline.step ? (100 * timeline.exposed / timeline.step).toFixed(1) : "0.0";
  title.textContent = `${timeline.kind}: ${ms(timeline.step)} modelled, ${share}% exposed`;
  const canvas = document.createElement("canvas");
  document.getElementById("charts").append(title, canvas);
  const height = timeline.rows.length * ROW + MEMORY + AXIS;
  const total = (point) => point.slice(1).reduce((sum, bytes) => sum + bytes, 0);
  const peak = Math.max(1, ...timeline.memory.map(total));
  let from = 0, to = Math.max(1, timeline.step), pen, width;

  const x = (ns) => LABEL + (ns - from) / (to - from) * (width - LABEL);
  const time = (px) => from + (px - LABEL) / (width - LABEL) * (to - from);

  function draw() {
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = width * scale;
    canvas.height = height * scale;
    pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(LABEL, 0, width - LABEL, height);
    pen.clip();
    for (const [row, activity, name, begin, end] of timeline.spans) {
      if (end < from || begin > to) continue;
      const left = x(begin), wide = Math.max(x(end) - left, 0.6);
      pen.fillStyle = DATA.colours[activity];
      pen.fillRect(left, row * ROW + 4, Math.max(wide - 0.4, 0.6), ROW - 8);
      const shown = Math.max(left, LABEL), room = Math.min(left + wide, width) - shown;
      if (room > 40) {
        pen.save();
        pen.beginPath();
        pen.rect(shown, row * ROW, room - 3, ROW);
        pen.clip();
        pen.fillStyle = "#fff";
        pen.fillText(name, shown + 4, row * ROW + ROW / 2);
        pen.restore();
      }
    }
    const base = timeline.rows.length * ROW + MEMORY;
    timeline.memory.forEach((point, at) => {
      const next = at + 1 < timeline.memory.length ? timeline.memory[at + 1][0] : timeline.step;
      if (next < from || point[0] > to) return;
      let below = 0;
      DATA.uses.forEach((use, number) => {
        const tall = point[number + 1] / peak * (MEMORY - 24);
        pen.fillStyle = use.colour;
        pen.fillRect(x(point[0]), base - below - tall, x(next) - x(point[0]) + 0.5, tall);
        below += tall;
      });
    });
    pen.restore();
    pen.fillStyle = "#444";
    timeline.rows.forEach((row, at) => pen.fillText(row, 6, at * ROW + ROW / 2));
    pen.fillText("memory", 6, base - MEMORY + 20);
    pen.fillText("peak " + size(peak), 6, base - MEMORY + 36);
    for (let tick = 0; tick <= 8; tick++) {
      const at = from + (to - from) * tick / 8;
      pen.textAlign = tick == 8 ? "right" : "left";
      pen.fillText(ms(at), x(at) + (tick == 8 ? -2 : 2), base + AXIS / 2);
      pen.textAlign = "left";
      pen.fillStyle = "#ddd";
      pen.fillRect(x(at), 0, 0.5, base);
      pen.fillStyle = "#444";
    }
  }

  function find(px, py) {
    const ns = time(px), row = Math.floor(py / ROW);
    if (px < LABEL) return "";
    if (row < timeline.rows.length) {
      const near = timeline.spans.find((span) => span[0] == row && span[3] <= ns && ns <= span[4]);
      if (!near) return "";
      const bucket = near[5] == null ? "" : `\nbucket ${near[5]}`;
      return `${near[2]}\n${near[1]}: ${ms(near[4] - near[3])}, from ${ms(near[3])}${bucket}`;
    }
    const point = timeline.memory.filter((item) => item[0] <= ns).pop();
    if (!point) return "";
    return [size(total(point)) + " at " + ms(ns),
      ...DATA.uses.map((use, at) => `${use.name}: ${size(point[at + 1])}`)].join("\n");
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const centre = time(event.offsetX), factor = Math.exp(event.deltaY * 0.002);
    const span = Math.min(Math.max((to - from) * factor, timeline.step / 1e5, 1), timeline.step || 1);
    from = Math.max(0, Math.min(centre - (centre - from) / (to - from) * span, timeline.step - span));
    to = from + span;
    draw();
  }, { passive: false });
  canvas.addEventListener("dblclick", () => { from = 0; to = Math.max(1, timeline.step); draw(); });
  canvas.addEventListener("mousemove", (event) => {
    if (event.buttons) {
      const shift = -event.movementX / (width - LABEL) * (to - from);
      const moved = Math.max(-from, Math.min(shift, timeline.step - to));
      from += moved;
      to += moved;
      draw();
    }
    const text = find(event.offsetX, event.offsetY);
    tip.style.display = text ? "block" : "none";
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 320) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  canvas.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  window.addEventListener("resize", draw);
  draw();
}

DATA.timelines.forEach(chart);
