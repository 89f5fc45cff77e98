package toolcall

import "bytes"

// gemmaUnit reads <|tool_call>call:NAME{key:value,…}<tool_call|>.
func gemmaUnit() state {
	return func(p *Parser, end bool) bool {
		const marker, word = "<|tool_call>", "call:"
		rest := p.buf[len(marker):]
		skip := spaceAt(rest)
		switch m := begins(rest[skip:], word); {
		case m == no: // the marker in prose
			return p.refuse(len(marker))
		case m == maybe && end:
			return p.cut("", "")
		case m == maybe:
			return p.tooLong(len(marker))
		}
		at := len(marker) + skip + len(word)
		raw, _, m := upTo(p.buf[at:], "{")
		name, ok := p.name(raw)
		switch {
		case m == maybe && end:
			return p.cut("", "")
		case m == maybe:
			return p.tooLong(len(marker))
		case m == no || !ok:
			return p.refuse(len(marker))
		}
		tool := p.tools[name]
		if tool == nil {
			tool = &schema{}
		}
		r := &literal{b: p.buf, i: at + len(raw), gemma: true}
		args, m := r.typed(tool, 0)
		switch {
		case m == maybe && bytes.Contains(p.buf, []byte(p.syn.ends[0])) && end, m == no:
			return p.malformed(end)
		case m == maybe && end:
			return p.cut(name, "")
		case m == maybe:
			return p.tooLong(len(marker))
		}
		p.whole(call{name, args})
		p.take(r.i)
		p.state = inTail
		return true
	}
}
