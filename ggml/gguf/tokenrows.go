package gguf

import (
	"fmt"
	"io"

	"kvasird/ggml/tensor"
)

// tokenRows is the token embedding of a model, which the first stage reads by rows.
type tokenRows struct {
	file  io.ReaderAt
	off   int64
	row   int64 // bytes
	dtype tensor.DType
	width int // elements
	count int // tokens
	scale float32
}

func (s *stage) tokenRows() (*tokenRows, error) {
	t, _ := s.m.Tensor("token_embd.weight") // newStage found it
	row, err := t.DType.RowBytes(t.Shape[0])
	if err != nil {
		return nil, fmt.Errorf("gguf: token_embd.weight: %w", err)
	}
	rows := &tokenRows{
		file: s.m.parts[t.Part].file, off: t.Offset, row: row, dtype: t.DType,
		width: int(t.Shape[0]), count: int(t.Shape[1]), scale: 1,
	}
	if s.rule.embeddingScale != nil {
		rows.scale = s.rule.embeddingScale(rows.width)
	}
	return rows, nil
}

// Tokens returns how many rows TokenRow knows: the vocabulary, in the first stage as
// RowStage makes it, else 0.
func (im *Image) Tokens() int {
	if im.tokens == nil {
		return 0
	}
	return im.tokens.count
}

// TokenType returns the type and the elements of a token's row, and the factor by which
// the model's graph would multiply it. Only where Tokens is not 0.
func (im *Image) TokenType() (t tensor.DType, width int, scale float32) {
	return im.tokens.dtype, im.tokens.width, im.tokens.scale
}

// TokenRow reads a token's row as it is stored, into dst if that is large enough. Bytes
// that are not held fail with an error that wraps ErrNotHeld.
func (im *Image) TokenRow(dst []byte, token int) ([]byte, error) {
	t := im.tokens
	if t == nil || token < 0 || token >= t.count {
		return nil, fmt.Errorf("gguf: row of token %d of %d", token, im.Tokens())
	}
	if int64(cap(dst)) < t.row {
		dst = make([]byte, t.row)
	}
	dst = dst[:t.row]
	if err := readAt(t.file, dst, t.off+int64(token)*t.row); err != nil {
		return nil, fmt.Errorf("gguf: row of token %d: %w", token, err)
	}
	return dst, nil
}
