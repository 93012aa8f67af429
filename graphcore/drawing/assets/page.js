// Makes every graph on the page that is not live yet respond: boxes open their tables, "/" searches.
(() => {
  const start = (root) => {
    const all = (selector, from = root) => [...from.querySelectorAll(selector)];
    const view = root.querySelector('.gc-view');
    const boxes = all('.gc-box', view);
    const links = all('[data-link]', view);
    const list = root.querySelector('.gc-list');
    const rows = all('tr[data-row]', list);
    const names = all('[data-name]').map((cell) => cell.textContent);
    const input = root.querySelector('input[type=search]');
    const output = root.querySelector('output');
    const steps = all('button[data-step]');
    const groups = all(':scope>details[data-box]', list);
    const still = matchMedia('(prefers-reduced-motion:reduce)').matches;
    const behavior = still ? 'auto' : 'smooth';
    const groupOf = (number) => groups.find((group) => group.dataset.box === number);
    const rowsByNumber = new Map(rows.map((row) => [row.dataset.row, row]));
    const firstRows = new Map(rows.map((row) => [row.dataset.box, row]).reverse());
    const rowOf = (number) => rowsByNumber.get(String(number));
    const boxOf = (row) => boxes.find((box) => box.dataset.box === row.dataset.box);

    for (const cell of all('td[data-n]', list)) cell.title = names[cell.dataset.n] || '';

    // scrolls only the picture, never the page
    const reveal = (box) => {
      const inner = box.getBoundingClientRect();
      const outer = view.getBoundingClientRect();
      const by = (low, high, from, to) => (low < from + 12 ? low - from - 12 : high > to - 12 ? high - to + 12 : 0);
      view.scrollBy({
        left: by(inner.left, inner.right, outer.left, outer.right),
        top: by(inner.top, inner.bottom, outer.top, outer.bottom),
        behavior,
      });
    };
    const picture = view.querySelector('svg');
    const [width, height] = ['width', 'height'].map((side) => Number(picture.getAttribute(side)));
    let scale = 1;
    const zoom = (to) => {
      const middle = [view.scrollLeft + view.clientWidth / 2, view.scrollTop + view.clientHeight / 2];
      const by = to / scale;
      scale = to;
      picture.setAttribute('width', width * scale);
      picture.setAttribute('height', height * scale);
      view.scrollLeft = middle[0] * by - view.clientWidth / 2;
      view.scrollTop = middle[1] * by - view.clientHeight / 2;
    };
    const zooms = {
      in: () => zoom(Math.min(scale * 1.25, 3)),
      out: () => zoom(Math.max(scale / 1.25, 0.05)),
      fit: () => zoom(scale === 1 ? Math.min((view.clientWidth - 36) / width, (view.clientHeight - 10) / height, 1) : 1),
    };
    for (const button of all('button[data-zoom]')) button.addEventListener('click', zooms[button.dataset.zoom]);
    // a picture wider than its view begins at its first node, wherever that is
    if (boxes.length) {
      const first = boxes[0].getBoundingClientRect();
      const seen = view.getBoundingClientRect();
      if (first.right > seen.right) view.scrollLeft = first.left + first.width / 2 - seen.left - seen.width / 2;
    }

    const select = (box) => {
      for (const other of boxes) other.classList.toggle('gc-on', other === box);
      for (const row of all('tr.gc-on', list)) row.classList.remove('gc-on');
      if (box) reveal(box);
    };
    const showRow = (row) => {
      for (let up = row; up && up !== root; up = up.parentElement) if (up.open === false) up.open = true;
      if (row.dataset.row !== undefined) select(boxOf(row));
      else for (const other of all('tr.gc-on', list)) other.classList.remove('gc-on');
      row.classList.add('gc-on');
      row.scrollIntoView({ block: 'center', behavior });
    };
    const press = (box) => {
      const group = groupOf(box.dataset.box);
      if (!group) return showRow(firstRows.get(box.dataset.box));
      const closing = group.open && box.classList.contains('gc-on');
      group.open = !closing;
      select(closing ? null : box);
      if (!closing) requestAnimationFrame(() => group.scrollIntoView({ block: 'nearest', behavior }));
    };

    const linksOf = new Map(boxes.map((box) => [box.dataset.box, []]));
    for (const link of links) for (const end of new Set(link.dataset.link.split(' '))) linksOf.get(end).push(link);
    for (const box of boxes) {
      if (!box.querySelector(':scope>title')) {
        // a node's tooltip, which a screen reader says, is what its row says: it is written once
        const row = firstRows.get(box.dataset.box);
        const cell = (name) => { const found = row.querySelector(`td.gc-${name}`); return found ? found.title || found.textContent : ''; };
        const title = document.createElementNS('http://www.w3.org/2000/svg', 'title');
        const change = row.querySelector('.gc-sign');
        title.textContent = [(change ? `${change.title}: ` : '') + cell('n'), cell('k')].filter(Boolean).join('\n');
        box.prepend(title);
      }
      box.setAttribute('tabindex', '0');
      box.setAttribute('role', 'button');
      const mine = linksOf.get(box.dataset.box);
      const heat = (on) => mine.forEach((link) => link.classList.toggle('gc-hot', on));
      box.addEventListener('click', () => press(box));
      box.addEventListener('keydown', (event) => {
        if (event.key !== 'Enter' && event.key !== ' ') return;
        event.preventDefault();
        event.stopPropagation(); // notebooks have shortcuts of their own
        press(box);
      });
      box.addEventListener('pointerenter', () => heat(true));
      box.addEventListener('pointerleave', () => heat(false));
      box.addEventListener('focus', () => heat(true));
      box.addEventListener('blur', () => heat(false));
    }
    list.addEventListener('click', (event) => {
      const link = event.target.closest('a[data-to]');
      if (!link) return;
      event.preventDefault();
      const to = link.dataset.to;
      const inside = link.closest('tr').dataset.inner !== undefined;
      const row = inside ? link.closest('tbody').querySelector(`:scope>tr[data-inner="${to}"]`) : rowOf(to);
      if (row) showRow(row);
    });

    const insideOf = (row) => {
      const next = row.nextElementSibling;
      return next && next.classList.contains('gc-inside') ? next : null;
    };
    const texts = rows.map((row) => {
      const name = row.querySelector('td[data-n]');
      const inside = insideOf(row);
      const parts = [row.textContent, name && names[name.dataset.n], row.dataset.group, inside && inside.textContent];
      return parts.filter(Boolean).join(' ').toLowerCase();
    });
    let before = null; // which groups were open before the search began
    let matches = [];
    let at = -1;
    const tell = () => {
      const searching = input.value.trim() !== '';
      const some = matches.length > 0 && searching;
      const many = `${matches.length} of ${rows.length} nodes`;
      output.textContent = !searching ? '' : at < 0 ? many : `${at + 1} of ${matches.length}`;
      for (const button of steps) button.disabled = !some;
    };
    const search = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (words.length && !before) before = new Map(groups.map((group) => [group, group.open]));
      const hits = new Set();
      matches = [];
      at = -1;
      rows.forEach((row, index) => {
        const hit = words.every((word) => texts[index].includes(word));
        row.hidden = !hit;
        const inside = insideOf(row);
        if (inside) inside.hidden = !hit;
        if (hit) { matches.push(row); hits.add(row.dataset.box); }
      });
      for (const group of groups) {
        group.hidden = !hits.has(group.dataset.box);
        if (words.length) group.open = !group.hidden && hits.size <= 8;
        else if (before) group.open = before.get(group);
      }
      if (!words.length) before = null;
      for (const box of boxes) box.classList.toggle('gc-dim', !hits.has(box.dataset.box));
      for (const link of links) link.classList.toggle('gc-dim', words.length > 0);
      select(null);
      tell();
    };
    const step = (by) => {
      if (!matches.length || !input.value.trim()) return;
      at = at < 0 ? (by > 0 ? 0 : matches.length - 1) : (at + by + matches.length) % matches.length;
      showRow(matches[at]);
      tell();
    };
    const STEPS = { Enter: 1, ArrowDown: 1, ArrowUp: -1 };
    input.addEventListener('input', search);
    input.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { input.value = ''; search(); input.blur(); }
      const by = STEPS[event.key];
      if (by) { event.preventDefault(); step(event.shiftKey ? -by : by); }
      event.stopPropagation(); // notebooks have shortcuts of their own
    });
    for (const button of steps) button.addEventListener('click', () => step(Number(button.dataset.step)));
    for (const name of ['pointerenter', 'focusin']) root.addEventListener(name, () => { window.gcNear = root; });
  };

  // of several graphs on a page the one last pointed at or used answers "/", else the first in sight
  const near = () => {
    if (window.gcNear && window.gcNear.isConnected) return window.gcNear;
    const roots = [...document.querySelectorAll('[data-gc]')];
    const seen = roots.find((root) => root.getBoundingClientRect().bottom > 0);
    return seen || roots[0];
  };
  const slash = (event) => {
    const busy = event.target.closest && event.target.closest('input,textarea,select,[contenteditable=true]');
    if (event.key !== '/' || busy || event.ctrlKey || event.metaKey || event.altKey) return;
    const input = near() && near().querySelector('input[type=search]');
    if (!input) return;
    event.preventDefault();
    input.focus();
    input.select();
  };
  for (const root of document.querySelectorAll('[data-gc]:not([data-live])')) {
    root.dataset.live = '';
    start(root);
  }
  if (!window.gcSlash) document.addEventListener('keydown', (window.gcSlash = slash));
})();
