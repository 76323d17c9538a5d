// The figures that are alive. A figure's data stands beside it, as JSON that the build wrote.
const make = (name, attributes = {}, ...inside) => {
  const one = document.createElement(name);
  for (const key in attributes) key in one ? (one[key] = attributes[key]) : one.setAttribute(key, attributes[key]);
  one.append(...inside);
  return one;
};
const labelled = (words, control) => make("label", {}, words + " ", control);
const choice = (name, values, act) =>
  make("select", {name, onchange: act}, ...values.map(value => make("option", {value}, String(value))));
const slider = (name, min, max, step, value, act) => make("input", {type: "range", name, min, max, step, value, oninput: act});
const button = (words, act) => make("button", {type: "button", onclick: act}, words);
const said = () => make("output", {ariaLive: "polite"});

// A ring: one row of the picture after the other.
function steps(figure) {
  const rows = [...figure.querySelectorAll("[data-step]")], text = said();
  let shown = rows.length - 1;
  const show = at => {
    shown = (at + rows.length) % rows.length;
    rows.forEach((row, i) => row.classList.toggle("later", i > shown));
    text.value = `step ${shown} of ${rows.length - 1}`;
  };
  figure.prepend(make("div", {className: "controls"}, button("◀ step", () => show(shown - 1)),
    button("step ▶", () => show(shown + 1)), text));
  show(shown);
}

// Plays the order of each rank: an instruction begins when its rank is free and what it needs is there. Costs are those of
// all layers of a rank, and T of a message. It is less than a chunk's work, so no message waits for another.
// Returns what ran: [{rank, letter, micro, chunk, begin, end}].
function play(name, order, p, costs) {
  const twoChunks = /[a-z]/.test(order), copies = name === "dualpipe", splits = order.includes("W");
  const chunks = twoChunks && !copies ? 2 : 1, last = p * chunks - 1;
  const stageOf = (rank, chunk) => !chunk ? rank : copies ? p - 1 - rank : name === "interleaved" ? p + rank : 2 * p - 1 - rank;
  const lists = order.split("/").map(list => list.split(" ").map(word =>
    ({letter: word[0].toUpperCase(), micro: +word.slice(1), chunk: word[0] > "Z" ? 1 : 0})));
  const cost = {F: costs.F / chunks, B: (costs.B + (splits ? 0 : costs.W)) / chunks, W: costs.W / chunks};
  const ended = {}, free = lists.map(() => 0), at = lists.map(() => 0), ran = [];
  for (let moved = true; moved;) {
    moved = false;
    lists.forEach((list, rank) => {
      for (let one; (one = list[at[rank]]); at[rank]++, moved = true) {
        const stage = stageOf(rank, one.chunk), key = (letter, stage) => letter + one.micro + "@" + stage;
        const needs = [];
        if (one.letter === "F" && stage > 0) needs.push(key("F", stage - 1));
        if (one.letter === "B") needs.push(key("F", stage), ...(stage < last ? [key("B", stage + 1)] : []));
        if (one.letter === "W") needs.push(key("B", stage));
        if (!needs.every(need => need in ended)) break;
        const begin = Math.max(free[rank], ...needs.map(need => ended[need].at + (ended[need].rank === rank ? 0 : costs.T)));
        free[rank] = begin + cost[one.letter];
        ended[key(one.letter, stage)] = {at: free[rank], rank};
        ran.push({...one, rank, begin, end: free[rank]});
      }
    });
  }
  return ran;
}

function schedule(box, orders) {
  const names = [...new Set(Object.keys(orders).map(key => key.split(" ")[0]))], NS = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(NS, "svg"), result = said(), now = said();
  const values = {name: "1f1b", p: 4, m: 8, F: 1, B: 1, W: 1, T: 0, time: 1};
  const has = () => orders[`${values.name} ${values.p} ${values.m}`];
  const number = (key, words, min, max, step) => {
    const shown = make("output", {}, String(values[key]));
    return labelled(words, make("span", {}, slider(key, min, max, step, values[key], e => {
      values[key] = +e.target.value, shown.value = e.target.value, draw();
    }), shown));
  };
  const draw = () => {
    const order = has();
    svg.replaceChildren();
    if (!order) return (result.value = "This schedule needs more micro-batches, or a multiple of the ranks."), (now.value = "");
    const ran = play(values.name, order, values.p, values);
    const total = Math.max(...ran.map(one => one.end)), work = values.m * (values.F + values.B + values.W);
    const until = values.time * total, scale = 820 / total, next = {};
    svg.setAttribute("viewBox", `0 0 900 ${values.p * 30}`), svg.setAttribute("width", 900), svg.setAttribute("font-size", 13);
    const add = (name, attributes, text) => {
      const one = svg.appendChild(document.createElementNS(NS, name));
      for (const key in attributes) one.setAttribute(key, attributes[key]);
      one.textContent = text || "";
    };
    for (let rank = 0; rank < values.p; rank++) {
      add("text", {x: 0, y: rank * 30 + 18}, "rank " + rank);
      add("rect", {x: 60, y: rank * 30, width: 820, height: 26, class: "idle"});
    }
    for (const one of ran) {
      const style = one.letter.toLowerCase() + " pass" + (one.chunk ? " pale" : "") + (one.begin >= until - 1e-9 ? " later" : "");
      const width = (one.end - one.begin) * scale;
      add("rect", {x: 60 + one.begin * scale, y: one.rank * 30, width, height: 26, class: style});
      if (width > 14 && !style.includes("later"))
        add("text", {x: 60 + one.begin * scale + width / 2, y: one.rank * 30 + 18, class: "mid on"}, one.letter + one.micro);
      if (one.begin < until - 1e-9 && one.end >= until - 1e-9) next[one.rank] = `${one.letter}${one.micro}`;
    }
    result.value = `time ${+total.toFixed(2)} = work ${+work.toFixed(2)} + bubble ${+(total - work).toFixed(2)}`;
    now.value = `until ${+until.toFixed(2)}: ` +
      [...Array(values.p).keys()].map(rank => `rank ${rank} ${next[rank] || "waits"}`).join(", ");
    svg.setAttribute("aria-label", `${values.name}: ${result.value}`);
  };
  svg.setAttribute("role", "img"), svg.style.minWidth = "720px";
  const move = by => {
    const ends = [...new Set(play(values.name, has() || orders["1f1b 4 8"], values.p, values).map(one => +one.end.toFixed(6)))].sort((a, b) => a - b);
    const total = ends.at(-1), here = ends.findIndex(end => end >= values.time * total - 1e-6);
    values.time = ends[Math.min(Math.max(here + by, 0), ends.length - 1)] / total;
    draw();
  };
  const select = (key, words, list) => {
    const one = choice(key, list, e => { values[key] = isNaN(e.target.value) ? e.target.value : +e.target.value; draw(); });
    one.value = values[key];
    return labelled(words, one);
  };
  const of = i => [...new Set(Object.keys(orders).map(key => +key.split(" ")[i]))].sort((a, b) => a - b);
  const indexed = (key, words, list) => {
    const shown = make("output", {}, String(values[key]));
    return labelled(words, make("span", {}, slider(key, 0, list.length - 1, 1, list.indexOf(values[key]), e => {
      values[key] = list[e.target.value], shown.value = values[key], draw();
    }), shown));
  };
  box.append(make("div", {className: "controls"}, select("name", "schedule", names), indexed("p", "ranks", of(1)),
    indexed("m", "micro-batches", of(2)), number("F", "forward", 0.5, 3, 0.1), number("B", "input gradient", 0.5, 3, 0.1),
    number("W", "weight gradient", 0.5, 3, 0.1), number("T", "message", 0, 0.2, 0.05), make("span", {}, button("◀ step", () => move(-1)), " ",
    button("step ▶", () => move(1)), " ", button("all", () => { values.time = 1; draw(); }))), svg, make("p", {}, result), make("p", {}, now));
  draw();
}

for (const figure of document.querySelectorAll("[data-alive]")) {
  const data = figure.nextElementSibling?.type === "application/json" ? JSON.parse(figure.nextElementSibling.textContent) : null;
  if (figure.dataset.alive === "steps") steps(figure);
  if (figure.dataset.alive === "schedule") schedule(figure, data);
  if (figure.dataset.alive === "chart") vegaEmbed(figure, data, {renderer: "svg", actions: false});
}
