package node

import (
	"context"
	"errors"
	"flag"
	"io"
)

type BenchOptions struct{}

func BenchFlags(set *flag.FlagSet) *BenchOptions { return &BenchOptions{} }

func Bench(ctx context.Context, opts *BenchOptions, out io.Writer) error { return errors.New("soon") }
