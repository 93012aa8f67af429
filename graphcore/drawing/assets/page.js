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
    const groupOf = (number) => list.querySelector(`:scope>details[data-box="${number}"]`);
    const rowOf = (number) => rows.find((row) => row.dataset.row === String(number));

    for (const cell of all('td[data-n]', list)) cell.title = names[cell.dataset.n] || '';

    const show = (element) => element.scrollIntoView({ block: 'nearest', behavior: 'smooth' });
    const select = (box) => {
      for (const other of boxes) other.classList.toggle('gc-on', other === box);
      for (const row of rows) row.classList.remove('gc-on');
    };
    const showRow = (row) => {
      for (let up = row; up && up !== root; up = up.parentElement) if (up.open === false) up.open = true;
      select(boxes.find((box) => box.dataset.box === row.dataset.box));
      row.classList.add('gc-on');
      row.scrollIntoView({ block: 'center', behavior: 'smooth' });
    };
    const press = (box) => {
      const group = groupOf(box.dataset.box);
      if (!group) return showRow(rowOf(box.dataset.box));
      const closing = group.open && box.classList.contains('gc-on');
      group.open = !closing;
      select(closing ? null : box);
      if (!closing) requestAnimationFrame(() => show(group));
    };

    for (const box of boxes) {
      const mine = links.filter((link) => link.dataset.link.split(' ').includes(box.dataset.box));
      const heat = (on) => mine.forEach((link) => link.classList.toggle('gc-hot', on));
      box.addEventListener('click', () => press(box));
      box.addEventListener('keydown', (event) => {
        if (event.key !== 'Enter' && event.key !== ' ') return;
        event.preventDefault();
        press(box);
      });
      box.addEventListener('pointerenter', () => heat(true));
      box.addEventListener('pointerleave', () => heat(false));
      box.addEventListener('focus', () => heat(true));
      box.addEventListener('blur', () => heat(false));
    }
    list.addEventListener('click', (event) => {
      const link = event.target.closest('a[data-to]');
      const row = link && rowOf(link.dataset.to);
      if (!row) return;
      event.preventDefault();
      showRow(row);
    });

    const texts = rows.map((row) => {
      const name = row.querySelector('td[data-n]');
      return `${row.textContent} ${name ? names[name.dataset.n] : ''} ${row.dataset.group || ''}`.toLowerCase();
    });
    let before = null;
    const search = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const groups = all(':scope>details[data-box]', list);
      if (words.length && !before) before = new Map(groups.map((group) => [group, group.open]));
      const hits = new Set();
      let count = 0;
      rows.forEach((row, at) => {
        const hit = words.every((word) => texts[at].includes(word));
        row.hidden = !hit;
        const inside = row.nextElementSibling;
        if (inside && inside.classList.contains('gc-inside')) inside.hidden = !hit;
        if (hit) { count += 1; hits.add(row.dataset.box); }
      });
      for (const group of groups) {
        group.hidden = !hits.has(group.dataset.box);
        if (words.length) group.open = !group.hidden && hits.size <= 8;
        else if (before) group.open = before.get(group);
      }
      if (!words.length) before = null;
      for (const box of boxes) box.classList.toggle('gc-dim', !hits.has(box.dataset.box));
      for (const link of links) link.classList.toggle('gc-dim', words.length > 0);
      output.textContent = words.length ? `${count} of ${rows.length} nodes` : '';
    };
    input.addEventListener('input', search);
    input.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') { input.value = ''; search(); input.blur(); }
      event.stopPropagation(); // notebooks have shortcuts of their own
    });
    document.addEventListener('keydown', (event) => {
      const busy = event.target.closest && event.target.closest('input,textarea,select,[contenteditable=true]');
      if (event.key !== '/' || busy || event.ctrlKey || event.metaKey || event.altKey) return;
      if (root !== document.querySelector('[data-gc]')) return;
      event.preventDefault();
      input.focus();
    });
  };
  for (const root of document.querySelectorAll('[data-gc]:not([data-live])')) {
    root.dataset.live = '';
    start(root);
  }
})();
