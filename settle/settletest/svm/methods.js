// The methods of the RPC, as nodes answer them. README.md says what is not faithful.
import { createRequire } from 'node:module'
import { mintDecimals, tokenAccount, tokenPrograms, uiAmount } from './balances.js'
import { RPCError } from './errors.js'
import { fromBase58, toBase58 } from './wire.js'

const { Account } = createRequire(import.meta.url)('litesvm-linux-x64-gnu')
const feature = { 'feature-set': 0, 'solana-core': 'litesvm-1.5.0' }

const key = (text) => {
  try {
    return fromBase58(text, 32)
  } catch (e) {
    throw new RPCError(-32602, `Invalid param: ${e.message}`)
  }
}

const context = (chain, value) => ({ context: { slot: Number(chain.slot), apiVersion: '4.3.0' }, value })

function accountJSON (account) {
  if (account === null || account.lamports() === 0n) return null
  return {
    lamports: Number(account.lamports()),
    data: [Buffer.from(account.data()).toString('base64'), 'base64'],
    owner: toBase58(account.owner()),
    executable: account.executable(),
    rentEpoch: Number(2n ** 53n - 1n),
    space: account.data().length
  }
}

function transactionBytes (text, encoding = 'base58') {
  if (typeof text !== 'string') throw new RPCError(-32602, 'Invalid params: no transaction')
  return encoding === 'base64' ? Buffer.from(text, 'base64') : fromBase58(text)
}

function transactionJSON (t, encoding) {
  if (encoding === 'base64') return [t.bytes.toString('base64'), 'base64']
  if (encoding === 'base58') return [toBase58(t.bytes), 'base58']
  const { tx } = t
  return {
    signatures: tx.signatures.map(toBase58),
    message: {
      header: {
        numRequiredSignatures: tx.header.signers,
        numReadonlySignedAccounts: tx.header.readonlySigners,
        numReadonlyUnsignedAccounts: tx.header.readonlyOthers
      },
      accountKeys: tx.keys.map(toBase58),
      recentBlockhash: toBase58(tx.blockhash),
      instructions: tx.instructions.map((i) => (
        { programIdIndex: i.program, accounts: i.accounts, data: toBase58(i.data), stackHeight: 1 })),
      addressTableLookups: tx.lookups.map((l) => (
        { accountKey: toBase58(l.table), writableIndexes: l.writable, readonlyIndexes: l.readonly }))
    }
  }
}

export const methods = {
  getHealth: () => 'ok',
  getVersion: () => feature,
  getGenesisHash: (chain) => chain.genesis,
  getFirstAvailableBlock: () => 0,
  getSlot: (chain, [o]) => Number(chain.slotAt(o?.commitment)),
  getBlockHeight: (chain, [o]) => Number(chain.slotAt(o?.commitment)),
  getLatestBlockhash: (chain) => context(chain, { blockhash: chain.svm.latestBlockhash(), lastValidBlockHeight: Number(chain.lastValidBlockHeight()) }),
  isBlockhashValid: (chain, [hash]) => context(chain, hash === chain.svm.latestBlockhash()),
  getMinimumBalanceForRentExemption: (chain, [size]) => Number(chain.svm.minimumBalanceForRentExemption(BigInt(size))),
  getBalance: (chain, [address]) => context(chain, Number(chain.svm.getBalance(key(address)) ?? 0n)),
  getAccountInfo: (chain, [address]) => context(chain, accountJSON(chain.svm.getAccount(key(address)))),
  getMultipleAccounts: (chain, [addresses]) => context(chain, addresses.map((a) => accountJSON(chain.svm.getAccount(key(a))))),

  getTokenAccountBalance (chain, [address]) {
    const t = tokenAccount(chain.svm.getAccount(key(address)))
    if (t === null) throw new RPCError(-32602, 'Invalid param: not a Token account')
    return context(chain, uiAmount(t.amount, mintDecimals(chain.svm, t.mint)))
  },

  getTokenAccountsByOwner (chain, [owner, filter]) {
    const found = tokenPrograms.filter((p) => filter.programId === undefined || filter.programId === p)
      .flatMap((p) => chain.svm.getProgramAccounts(fromBase58(p)))
      .map((a) => ({ address: toBase58(a.address), account: a.account(), token: tokenAccount(a.account()) }))
      .filter(({ token }) => token !== null && toBase58(token.owner) === owner &&
        (filter.mint === undefined || toBase58(token.mint) === filter.mint))
    return context(chain, found.map((a) => ({ pubkey: a.address, account: accountJSON(a.account) })))
  },

  sendTransaction: (chain, [text, o]) => chain.send(transactionBytes(text, o?.encoding), !o?.skipPreflight),

  simulateTransaction (chain, [text, o]) {
    const s = chain.simulate(transactionBytes(text, o?.encoding))
    return context(chain, { err: s.err, logs: s.logs, unitsConsumed: Number(s.units), accounts: null, returnData: null })
  },

  getSignatureStatuses (chain, [signatures]) {
    return context(chain, signatures.map((signature) => {
      const t = chain.transactions.get(signature)
      if (t === undefined) return null
      const status = chain.commitmentOf(t.slot)
      return {
        slot: Number(t.slot),
        confirmations: status === 'finalized' ? null : Number(chain.slot - t.slot),
        err: t.meta.err,
        status: t.meta.status,
        confirmationStatus: status
      }
    }))
  },

  getSignaturesForAddress (chain, [address, o]) {
    let found = [...chain.transactions].reverse()
      .filter(([, t]) => t.keys.includes(address) && t.slot <= chain.slotAt(o?.commitment))
    const from = o?.before === undefined ? -1 : found.findIndex(([s]) => s === o.before)
    found = found.slice(from + 1)
    const until = o?.until === undefined ? -1 : found.findIndex(([s]) => s === o.until)
    if (until >= 0) found = found.slice(0, until)
    return found.slice(0, o?.limit ?? 1000).map(([signature, t]) => ({
      signature,
      slot: Number(t.slot),
      err: t.meta.err,
      memo: null,
      blockTime: Number(chain.blockTime(t.slot)),
      confirmationStatus: chain.commitmentOf(t.slot)
    }))
  },

  getTransaction (chain, [signature, o]) {
    const options = typeof o === 'string' ? { encoding: o } : o ?? {}
    const t = chain.transactions.get(signature)
    if (options.commitment === 'processed') throw new RPCError(-32602, 'Method does not support commitment below `confirmed`')
    if (t === undefined || t.slot > chain.slotAt(options.commitment)) return null
    const newest = options.maxSupportedTransactionVersion
    if (t.tx.version !== 'legacy' && (newest === undefined || newest < t.tx.version)) {
      throw new RPCError(-32015, `Transaction version (${t.tx.version}) is not supported by the requesting client. ` +
        'Please try the request again with the following configuration parameter: "maxSupportedTransactionVersion": ' + t.tx.version)
    }
    return {
      slot: Number(t.slot),
      blockTime: Number(chain.blockTime(t.slot)),
      version: newest === undefined ? undefined : t.tx.version,
      transaction: transactionJSON(t, options.encoding),
      meta: t.meta
    }
  },

  requestAirdrop (chain, [address, lamports]) {
    chain.beforeChange()
    return toBase58(chain.svm.airdrop(key(address), BigInt(lamports)).signature())
  },

  harness_advance: (chain, [slots]) => { chain.advance(slots); return Number(chain.slot) },
  harness_rollback: (chain, [slot]) => { chain.rollback(slot); return Number(chain.slot) },

  // An account as if it had always been so.
  harness_setAccount (chain, [{ address, lamports, owner, data }]) {
    chain.beforeChange()
    chain.svm.setAccount(key(address), new Account(BigInt(lamports), Buffer.from(data, 'base64'), key(owner), false, 2n ** 64n - 1n))
    return true
  },

  harness_addProgram (chain, [{ address, data }]) {
    chain.beforeChange()
    chain.svm.addProgram(key(address), Buffer.from(data, 'base64'))
    return true
  }
}
