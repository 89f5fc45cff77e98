package gateway

import (
	"strings"
	"unicode/utf8"
)

// TextFilter turns the bytes of tokens into text that is safe to send: whole
// runes only, and nothing that is or may become a stop string. The zero value
// with stop strings is ready.
type TextFilter struct {
	Stops   []string
	bytes   []byte // the beginning of a rune
	held    string // text that a stop string may begin in
	stopped bool   // a stop string came; everything after it is dropped
	stop    string
}

// Add takes a token's bytes and returns the text that can go out now.
func (f *TextFilter) Add(piece []byte) string {
	if f.stopped {
		return ""
	}
	f.bytes = append(f.bytes, piece...)
	n := wholeRunes(f.bytes)
	f.held += string([]rune(string(f.bytes[:n]))) // each invalid byte becomes U+FFFD
	f.bytes = append(f.bytes[:0], f.bytes[n:]...)
	return f.release()
}

// Stopped says that a stop string came: nothing more will go out.
func (f *TextFilter) Stopped() bool { return f.stopped }

// Stop is the stop string that came, or "".
func (f *TextFilter) Stop() string { return f.stop }

// End returns what is left: a rune that never got whole becomes U+FFFD bytewise.
func (f *TextFilter) End() string {
	if f.stopped {
		return ""
	}
	if len(f.bytes) > 0 {
		f.held += string([]rune(string(f.bytes)))
		f.bytes = nil
	}
	text := f.release()
	if f.stopped {
		return text
	}
	text += f.held
	f.held = ""
	return text
}

// release cuts at the stop string that is complete first, however the text was
// split into tokens, and keeps back the longest tail that one may begin with.
func (f *TextFilter) release() string {
	cut, end, keep, stop := -1, len(f.held)+1, 0, ""
	for _, s := range f.Stops {
		if i := strings.Index(f.held, s); i >= 0 && (i+len(s) < end || i+len(s) == end && i < cut) {
			cut, end, stop = i, i+len(s), s
		}
		for n := min(len(s)-1, len(f.held)); n > keep; n-- {
			if strings.HasSuffix(f.held, s[:n]) {
				keep = n
			}
		}
	}
	if cut >= 0 {
		f.stopped, f.stop = true, stop
		text := f.held[:cut]
		f.held = ""
		return text
	}
	text := f.held[:len(f.held)-keep]
	f.held = f.held[len(f.held)-keep:]
	return text
}

// wholeRunes is the length of b without an incomplete rune at its end.
func wholeRunes(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if c := b[len(b)-n]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-n:]) {
				return len(b) - n
			}
			break
		}
	}
	return len(b)
}
