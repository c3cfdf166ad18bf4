// Logged values: a picture for each name, added on scrolling; and a filter of names.

import { choose, chosen } from "./address.js";
import { curves } from "./curves.js";
import { choice, el, labelled } from "./dom.js";
import { marks } from "./marks.js";
import { Picture } from "./picture.js";
import { isSaved } from "./saved.js";

const AT_ONCE = 24;
// Values that otel_ddp reads by itself, and the names under which programs log the same value.
const READ = {
  loss: ["train_loss"],
  learning_rate: ["lr", "train_lr", "train_learning_rate"],
  grad_norm: ["gradient_norm", "train_grad_norm", "train_gradient_norm"],
};

export class Values {
  constructor(run, axis, look) {
    Object.assign(this, { run, axis, look });
    this.names = [];
    this.shown = new Map();
    this.grid = el("div", { class: "grid" });
    this.count = el("p", { class: "quiet", role: "status" });
    this.more = el("button", { type: "button", hidden: true, click: () => this.showMore() }, "Show more");
    this.limit = AT_ONCE;
    new IntersectionObserver((entries) => {
      if (entries.some((each) => each.isIntersecting) && !this.more.hidden) this.showMore();
    }, { rootMargin: "600px" }).observe(this.more);
    const filter = el("input", {
      type: "search", value: chosen("name"), placeholder: "loss, /^grad/",
      input: () => {
        choose("name", filter.value);
        this.limit = AT_ONCE;
        this.lay();
      },
    });
    this.filter = filter;
    this.element = el(
      "section", { "aria-labelledby": "values" },
      el("h2", { id: "values" }, "Values"),
      el("div", { class: "controls" }, labelled("Filter", filter), this.count),
      this.grid, this.more,
    );
  }

  setNames(names) {
    if (names.length === this.names.length && names.every((name, at) => name === this.names[at])) return;
    this.names = names;
    this.lay();
  }

  showMore() {
    this.limit += AT_ONCE;
    this.lay();
  }

  /** Show the pictures of the names that match the filter, and remove all others. */
  lay() {
    const [names, twice] = arranged(this.names);
    // Without a filter, hide values that are also logged under another name.
    const hidden = this.filter.value.trim() ? [] : twice;
    const wanted = names.filter(matcher(this.filter.value)).filter((name) => !hidden.includes(name));
    const now = wanted.slice(0, this.limit);
    for (const [name, picture] of this.shown) {
      if (!now.includes(name)) {
        picture.remove();
        this.shown.delete(name);
      }
    }
    for (const name of now) {
      if (!this.shown.has(name)) this.shown.set(name, this.picture(name));
      this.grid.append(this.shown.get(name).element);
    }
    this.more.hidden = wanted.length <= now.length;
    const remarks = [`${wanted.length} of ${this.names.length} names`];
    if (hidden.length) remarks.push(`${hidden.join(", ")} is logged under another name: filter for it to see it`);
    // The program logs no values, and otel_ddp reads no loss, because the model returns none.
    if (!names.includes("loss") && names.every((name) => name in READ)) {
      remarks.push('no loss is read, as the model returns none: run.log({"loss": loss}, step=step) logs it');
    }
    this.count.textContent = this.names.length
      ? remarks.join("; ")
      : "Nothing is logged yet: run.log({\"loss\": loss}, step=step) logs a value.";
  }

  picture(name) {
    const { look } = this;
    return new Picture({
      title: name, path: "values", axis: this.axis,
      parameters: () => ({ ...this.run.key(), name, over: "ranks", rank: look.rank || null }),
      draw: (answer, kind) => {
        const splits = [...new Set(answer.series.map((each) => each.split || ""))];
        const split = (each) => splits.indexOf(each.split || "");
        const drawn = curves(answer, kind, { name: (each) => each.split || `rank ${each.rank}`, color: split, dashed: split, smoothing: look.smoothing, isLog: look.log });
        return { ...drawn, spans: marks(this.run.verdicts(), kind, this.run.attempts()) };
      },
    });
  }
}

/** All names, first those that the program logs; and the names that duplicate one of the program. */
function arranged(names) {
  const plain = new Set(names.map((name) => name.toLowerCase().replace(/[/.]/g, "_")));
  const isRead = (name) => name in READ;
  const twice = names.filter((name) => isRead(name) && READ[name].some((other) => plain.has(other)));
  return [[...names.filter((name) => !isRead(name)), ...names.filter(isRead)], twice];
}

/** A filter of names: by words that must all occur, or by a regular expression between slashes. */
export function matcher(text) {
  const between = /^\/(.+)\/$/.exec(text.trim());
  if (between) {
    try {
      const pattern = new RegExp(between[1], "i");
      return (name) => pattern.test(name);
    } catch {
      return () => true;
    }
  }
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return (name) => words.every((word) => name.toLowerCase().includes(word));
}

/** The controls of all pictures of a run: kind of x, rank, smoothing, log axis. */
export function lookControls(axis, look, ranks, changed) {
  const smoothing = el("input", {
    type: "range", min: "0", max: "0.99", step: "0.01", value: String(look.smoothing),
    input: () => {
      look.smoothing = Number(smoothing.value);
      choose("smooth", smoothing.value, "0");
      axis.redraw();
    },
  });
  const log = el("input", {
    type: "checkbox", checked: look.log,
    change: () => {
      look.log = log.checked;
      choose("log", log.checked ? "1" : "");
      axis.redraw();
    },
  });
  const kinds = choice(["step", "time", "epoch"].map((kind) => [kind, kind]), axis.kind, (kind) => axis.change(kind));
  const rank = el("input", {
    type: "number", min: "0", max: String(ranks - 1), placeholder: "all", value: look.rank,
    change: () => {
      look.rank = rank.value;
      choose("rank", rank.value);
      changed();
    },
  });
  return el(
    "div", { class: "controls", role: "group", "aria-label": "How pictures look" },
    labelled("x", kinds), isSaved || ranks < 2 ? null : labelled("Rank", rank), labelled("Smoothing", smoothing), labelled("Log axis", log),
  );
}

export function look() {
  const smoothing = Number(chosen("smooth", "0"));
  return {
    smoothing: smoothing >= 0 && smoothing < 1 ? smoothing : 0,
    log: chosen("log") === "1",
    rank: isSaved ? "" : chosen("rank"),
  };
}
