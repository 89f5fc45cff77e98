package gateway

import (
	"errors"
	"net/http"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// A zstd body says how much of what was decoded a decoder must keep, which a slow client
// would have us keep for as long as it sends. So the body is read first and decoded at
// once, where that is the decoded body itself, for few requests at a time.
var (
	smallZstd = sync.OnceValue(func() *zstd.Decoder { return newZstd(smallBody) })
	largeZstd = sync.OnceValue(func() *zstd.Decoder { return newZstd(maxBody) })
)

// newZstd decodes to at most limit bytes, with a window of at most as many.
func newZstd(limit uint64) *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(maxPreparing), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(limit), zstd.WithDecoderMaxWindow(limit))
	if err != nil {
		panic(err) // these options are sound
	}
	return d
}

// unpackZstd decodes a body that is here.
func (g *Gateway) unpackZstd(r *http.Request, packed []byte, hold *held) ([]byte, *apiError) {
	data, err := smallZstd().DecodeAll(packed, nil)
	if exceeds(err) {
		if !hold.takeLarge(r, g) {
			return nil, clientClosed()
		}
		data, err = largeZstd().DecodeAll(packed, nil)
	}
	switch {
	case exceeds(err), len(data) > maxBody:
		return nil, tooLarge()
	case err != nil:
		return nil, undecodable("zstd", err)
	}
	return data, nil
}

func exceeds(err error) bool {
	return errors.Is(err, zstd.ErrDecoderSizeExceeded) || errors.Is(err, zstd.ErrWindowSizeExceeded)
}
