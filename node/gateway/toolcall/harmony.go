package toolcall

import (
	"bytes"
	"strings"
)

// gpt-oss writes messages in channels: a header, <|message|>, a body, and a token
// that ends it. The prompt already opened the first message, so that an answer
// begins within a header.
var (
	harmonyEnds    = []string{"<|end|>", "<|call|>", "<|return|>"}
	harmonyStops   = append([]string{"<|start|>", "<|channel|>"}, harmonyEnds...)
	harmonyOpens   = []string{"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to=", "assistant<|", "assistant to="}
	harmonyMessage = "<|message|>"
)

const maxHarmonyHeader = 512

// harmonyHeader is before a message, or in an answer that has none.
func harmonyHeader(p *Parser, end bool) bool {
	skip := spaceAt(p.buf)
	rest := p.buf[skip:]
	if m, which := beginsAny(rest, harmonyEnds); m == yes {
		p.take(skip + len(which))
		return true
	} else if m == maybe && !end && skip <= maxSpace {
		return false
	}
	switch m, _ := beginsAny(rest, harmonyOpens); {
	case len(rest) == 0:
		return p.drop()
	case m == maybe && !end && skip <= maxSpace:
		return false
	case m != yes || skip > maxSpace:
		p.state = harmonyBody(Text)
		return true
	}
	return p.harmonyMessage(skip, rest, end)
}

// harmonyMessage reads a header, which begins at rest, up to the message.
func (p *Parser) harmonyMessage(skip int, rest []byte, end bool) bool {
	at := bytes.Index(rest, []byte(harmonyMessage))
	switch {
	case at > maxHarmonyHeader, at < 0 && len(rest) > maxHarmonyHeader+len(harmonyMessage):
		_, which := beginsAny(rest, harmonyOpens)
		p.say(Text, string(p.buf[:skip+len(which)]))
		p.take(skip + len(which))
		p.state = harmonyBody(Text)
		return true
	case at < 0 && !end:
		return false
	case at < 0:
		if bytes.Contains(rest, []byte("to=functions")) {
			return p.cut("", "")
		}
		return p.drop()
	}
	n := skip + at + len(harmonyMessage)
	p.pending = string(p.buf[:n])
	header := string(rest[:at])
	p.take(n)
	p.state = p.harmonyKind(header)
	return true
}

// harmonyKind says what a header announces. The recipient may stand in the role
// or behind the channel, whichever channel it is.
func (p *Parser) harmonyKind(header string) state {
	if i := strings.LastIndex(header, "to="); i >= 0 {
		to := header[i+len("to="):]
		if n := strings.IndexAny(to, " <\n"); n >= 0 {
			to = to[:n]
		}
		name, ok := p.name(to)
		if ok && p.reads && (strings.HasPrefix(to, "functions.") || p.tools[name] != nil) {
			return harmonyCall(name)
		}
		if to != "user" && to != "assistant" && to != "all" {
			return harmonyBody(Reasoning) // a tool that is built into other servers
		}
	}
	if strings.Contains(header, "<|channel|>analysis") {
		return harmonyBody(Reasoning)
	}
	return harmonyBody(Text)
}

func harmonyBody(k Kind) state {
	return func(p *Parser, end bool) bool {
		p.pending = ""
		if i, which := first(p.buf, harmonyStops); i >= 0 {
			p.say(k, string(p.buf[:i]))
			if p.take(i); which != "<|start|>" && which != "<|channel|>" {
				p.take(len(which))
			}
			p.state = harmonyHeader
			return true
		}
		n := len(p.buf)
		if !end {
			n -= unsure(p.buf, harmonyStops)
		}
		p.say(k, string(p.buf[:n]))
		p.take(n)
		return false
	}
}

// harmonyCall reads the arguments of a call.
func harmonyCall(name string) state {
	var s jsonScan
	return func(p *Parser, end bool) bool {
		rest := p.buf[spaceAt(p.buf):]
		stop, _ := first(p.buf, harmonyStops)
		if len(rest) == 0 && !end {
			return p.tooLong(len(p.buf))
		}
		if len(rest) == 0 {
			return p.cut(name, "")
		}
		if m, _ := beginsAny(rest, harmonyStops); m == yes {
			return p.harmonyDone(call{name, "{}"}, stop)
		} else if m == maybe && !end {
			return false
		}
		n, m := s.scan(p.buf[len(p.buf)-len(rest):])
		args, ok := "", false
		if m == yes {
			args, ok = object(rest[:n])
		}
		switch {
		case ok:
			return p.harmonyDone(call{name, args}, len(p.buf)-len(rest)+n)
		case stop >= 0 && (m != maybe || end): // no JSON: what was written is text
			p.home = harmonyHeader
			return p.refuse(stop)
		case m == maybe && end:
			return p.cut(name, string(rest))
		case end:
			p.home = harmonyHeader
			return p.refuse(len(p.buf))
		}
		return p.tooLong(len(p.buf))
	}
}

func (p *Parser) harmonyDone(c call, n int) bool {
	p.whole(c)
	p.take(n)
	p.state, p.trim = harmonyHeader, false
	return true
}
