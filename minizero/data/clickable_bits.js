// Puts a button for each bit into every element of the class "clickable-bits" that has none yet. No library is needed.
// The element says in its data-… attributes: bits (the pattern), exponent and mantissa (how many bits these fields
// have), colors (of sign, exponent, mantissa) and presets (pairs of a word for a button and its pattern). See clickable.py.
(function () {
  const raised = n => String(n).replace(/./g, c => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  const written = n => Object.is(n, -0) ? "−0" : String(n).replaceAll("-", "−");

  function start(root) {
    const e = +root.dataset.exponent, m = +root.dataset.mantissa;
    const width = 1 + e + m, bias = 2 ** (e - 1) - 1, top = 2 ** e - 1, half = 2 ** (width - 1);
    const colors = JSON.parse(root.dataset.colors), presets = JSON.parse(root.dataset.presets);
    let bits = +root.dataset.bits;
    const bit = place => Math.floor(bits / 2 ** place) % 2;

    const button = (data, text, style) => `<button type="button" ${data} style="font: inherit; color: #000; ` +
      `cursor: pointer; border: 1px solid #777; border-radius: 4px; margin: 1px; ${style}">${text}</button>`;
    const plain = (data, text) => button(data, text, "padding: 0.2em 0.6em; background: #eee;");

    // The value, and a line on each field.
    function decode() {
      const minus = bits >= half, code = bits % half, field = Math.floor(code / 2 ** m), mantissa = code % 2 ** m;
      const binary = code.toString(2).padStart(e + m, "0"), sign = minus ? "−" : "+";
      const first = `exponent field ${binary.slice(0, e)} = ${field}`, second = `mantissa ${binary.slice(e)} = ${mantissa}`;
      if (field === top) {
        const value = mantissa ? NaN : minus ? -Infinity : Infinity;
        const kind = mantissa ? "NaN, not a number" : sign + " infinity";
        return { value, lines: [first + ": kept for infinity and NaN", second, `<b>${kind}</b>`] };
      }
      const leading = field ? 1 : 0, exponent = (field || 1) - bias, significand = leading + mantissa / 2 ** m;
      const value = (minus ? -1 : 1) * significand * 2 ** exponent;
      const how = field ? `, and ${field} − ${bias} = ${written(exponent)}`
        : `: no leading 1, and the exponent of field 1, ${written(exponent)}`;
      return { value, lines: [
        first + how,
        `${second}, and ${leading} + ${mantissa}/${2 ** m} = ${significand}`,
        `${sign} ${significand} × 2${raised(exponent)} = <b>${written(value)}</b>`,
      ] };
    }

    function draw() {
      let row = "", more = plain('data-step="-1"', "◀ next below") + plain('data-step="1"', "next above ▶") + " &nbsp; ";
      for (let place = width - 1; place >= 0; place--) {
        const color = colors[place === width - 1 ? 0 : place >= m ? 1 : 2];
        const gap = place === m || place === width - 1 ? "0.5em" : "1px";
        row += button(`data-place="${place}" aria-label="bit ${place}, ${bit(place)}"`, bit(place),
          `width: 1.7em; padding: 0.2em 0; font-size: 1.3em; font-weight: bold; background: ${color}; margin-right: ${gap};`);
      }
      for (const [name, to] of presets) more += plain(`data-bits="${to}"`, name);
      const { value, lines } = decode();
      root.innerHTML = `<div>${row}</div><div class="value" data-value="${value}" style="line-height: 1.6; margin: 0.4em 0">` +
        `sign ${bits >= half ? "1: −" : "0: +"}<br>${lines.join("<br>")}</div><div>${more}</div>`;
    }

    root.addEventListener("click", event => {
      const { place, bits: pattern, step } = event.target.dataset, code = bits % half;
      if (place) bits += (bit(+place) ? -1 : 1) * 2 ** place;
      else if (pattern) bits = +pattern;
      else if (step) {  // without their sign, patterns have the order of the numbers that they stand for
        const outward = (step === "1") === (bits < half);
        if (outward ? code < top * 2 ** m : code > 0) bits += outward ? 1 : -1;
      } else return;
      draw();
      const again = place ? `[data-place="${place}"]` : step ? `[data-step="${step}"]` : `[data-bits="${pattern}"]`;
      root.querySelector("button" + again)?.focus();
    });
    // On slides the space bar means "next", unless it presses a button.
    root.addEventListener("keydown", event => { if (event.key === " ") event.stopPropagation(); });
    draw();
  }

  // Later, since some pages run a script before what stands above it is in the page.
  setTimeout(() => document.querySelectorAll(".clickable-bits:not([data-ready])").forEach(root => {
    root.dataset.ready = "yes";
    start(root);
  }), 0);
})();
