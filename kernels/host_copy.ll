; Copies fragments of KV blocks in host memory past the caches.
;
; For every pair p of blocks and every fragment f of a block:
;   lengths[f] bytes from  sources[p] + source_offsets[f]  to  targets[p] + target_offsets[f]
;
; What is copied here is read next by another core or device, or much later: the destination is written with
; streaming (non-temporal) stores, which spare the read of every line that is about to be overwritten and leave
; the caches to the model. Only whole aligned lines are streamed; the ends of a fragment are copied as usual.
; The launcher has checked every address; ranges that are read must not overlap ranges that are written.

define void @copy_fragments(ptr noalias readonly %targets, ptr noalias readonly %sources, i64 %num_pairs,
                            ptr noalias readonly %target_offsets, ptr noalias readonly %source_offsets,
                            ptr noalias readonly %lengths, i64 %num_fragments) {
entry:
  %no_pairs = icmp eq i64 %num_pairs, 0
  %no_fragments = icmp eq i64 %num_fragments, 0
  %nothing = or i1 %no_pairs, %no_fragments
  br i1 %nothing, label %done, label %pair

pair:
  %p = phi i64 [ 0, %entry ], [ %p.next, %pair.end ]
  %target.at = getelementptr inbounds i64, ptr %targets, i64 %p
  %source.at = getelementptr inbounds i64, ptr %sources, i64 %p
  %target.base = load i64, ptr %target.at
  %source.base = load i64, ptr %source.at
  br label %fragment

fragment:
  %f = phi i64 [ 0, %pair ], [ %f.next, %fragment.end ]
  %target.offset.at = getelementptr inbounds i64, ptr %target_offsets, i64 %f
  %source.offset.at = getelementptr inbounds i64, ptr %source_offsets, i64 %f
  %length.at = getelementptr inbounds i64, ptr %lengths, i64 %f
  %target.offset = load i64, ptr %target.offset.at
  %source.offset = load i64, ptr %source.offset.at
  %length = load i64, ptr %length.at
  %target.address = add i64 %target.base, %target.offset
  %source.address = add i64 %source.base, %source.offset
  %target = inttoptr i64 %target.address to ptr
  %source = inttoptr i64 %source.address to ptr
  ; The head reaches to the next line of the target, or to the end of a fragment that has no whole line.
  %negative = sub i64 0, %target.address
  %to.line = and i64 %negative, 63
  %head = call i64 @llvm.umin.i64(i64 %to.line, i64 %length)
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %head, i1 false)
  %rest = sub i64 %length, %head
  %body = and i64 %rest, -64
  %body.end = add i64 %head, %body
  %has.body = icmp ne i64 %body, 0
  br i1 %has.body, label %line, label %tail

line:
  %at = phi i64 [ %head, %fragment ], [ %at.next, %line ]
  %line.source = getelementptr inbounds i8, ptr %source, i64 %at
  %line.target = getelementptr inbounds i8, ptr %target, i64 %at
  %bytes = load <64 x i8>, ptr %line.source, align 1
  store <64 x i8> %bytes, ptr %line.target, align 64, !nontemporal !0
  %at.next = add i64 %at, 64
  %more.lines = icmp ult i64 %at.next, %body.end
  br i1 %more.lines, label %line, label %tail

tail:
  %tail.bytes = sub i64 %length, %body.end
  %tail.source = getelementptr inbounds i8, ptr %source, i64 %body.end
  %tail.target = getelementptr inbounds i8, ptr %target, i64 %body.end
  call void @llvm.memcpy.p0.p0.i64(ptr %tail.target, ptr %tail.source, i64 %tail.bytes, i1 false)
  br label %fragment.end

fragment.end:
  %f.next = add i64 %f, 1
  %more.fragments = icmp ult i64 %f.next, %num_fragments
  br i1 %more.fragments, label %fragment, label %pair.end

pair.end:
  %p.next = add i64 %p, 1
  %more.pairs = icmp ult i64 %p.next, %num_pairs
  br i1 %more.pairs, label %pair, label %done

done:
  ; Streaming stores are weakly ordered: whoever is told next must find the bytes.
  fence seq_cst
  ret void
}

declare i64 @llvm.umin.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr noalias writeonly, ptr noalias readonly, i64, i1)

!0 = !{i32 1}
